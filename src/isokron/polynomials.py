"""Odd quintics p(x) = ax + bx³ + cx⁵ that drive singular values towards one, step by step."""

from collections.abc import Sequence

Coefficients = tuple[float, float, float]
Choice = str | Coefficients | Sequence[Coefficients]

TAYLOR: Coefficients = (15 / 8, -10 / 8, 3 / 8)

# The best uniform approximation of 1 by such a quintic on [0.001, 1], then on the interval that
# this leaves, and so on: found by Remez's algorithm (Grishina et al., 2506.10935).
CANS: list[Coefficients] = [
    (8.47032880385, -25.1080747067, 18.6292755991),
    (4.18283418329, -3.10870110989, 0.58060668135),
    (3.96185727896, -2.95406374636, 0.562976117954),
    (3.28658621703, -2.46472013453, 0.507357693861),
    (2.27374999443, -1.64466036791, 0.416190927498),
    (1.88871619735, -1.26515722534, 0.376518925557),
    (1.8750008859, -1.25000098437, 0.375000098469),
]
# The same, cushioned so that small singular values do not wait for the smallest
# (Amsel et al., 2505.16932).
POLAR_EXPRESS: list[Coefficients] = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
]
# Polar Express runs as if every singular value were so much larger than it is: rounding in half
# precision may push one beyond the interval, outside of which these polynomials explode.
SAFETY = 1.01

# One triple a step; the last is repeated where more steps are asked for.
POLYNOMIALS: dict[str, list[Coefficients]] = {
    # the slope at zero is as large as it can be while [0, 1] stays near 1 (K. Jordan, 2024)
    "classic": [(3.4445, -4.7750, 2.0315)],
    "polar_express": [
        *((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in POLAR_EXPRESS),
        TAYLOR,
    ],
    "cans": [*CANS, TAYLOR],
    # slow from small singular values, but converges to 1 to the bit
    "exact": [TAYLOR],
}


def schedule(coefficients: Choice | None, steps: int) -> list[Coefficients]:
    """One triple a step, from a name in POLYNOMIALS, one triple for all or one for each.

    None: "classic".
    """
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps must be an integer of at least 0, got {steps!r}")
    if coefficients is None:
        coefficients = "classic"
    if isinstance(coefficients, str):
        if coefficients not in POLYNOMIALS:
            raise ValueError(
                f"coefficients must be one of {sorted(POLYNOMIALS)} or triples (a, b, c), "
                f"got {coefficients!r}"
            )
        named = POLYNOMIALS[coefficients]
        return (named + named[-1:] * steps)[:steps]
    triples = list(coefficients)
    if len(triples) == 3 and all(isinstance(c, (int, float)) for c in triples):
        a, b, c = triples
        return [(a, b, c)] * steps  # type: ignore[list-item]
    if len(triples) != steps or any(
        not isinstance(triple, Sequence) or len(triple) != 3 for triple in triples
    ):
        raise ValueError(
            f"coefficients must be one triple (a, b, c) or one a step ({steps}), "
            f"got {coefficients!r}"
        )
    return triples  # type: ignore[return-value]
