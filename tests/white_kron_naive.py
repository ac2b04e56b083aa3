"""Quad and Skew as written down: float64, one block at a time, nothing shared with the package."""

from collections.abc import Callable

import numpy as np

Array = np.ndarray
Probes = Callable[[int], Array]


def bound(a: Array, probes: Array) -> float:
    top = np.abs(a).max()
    if top == 0:
        return 0.0
    a = a / top
    row = a[np.argmax((a**2).sum(1))]
    v = row + np.sqrt((row**2).mean()) * probes
    for _ in range(6):
        v = v @ a
        v /= np.linalg.norm(v, axis=1, keepdims=True)
    return top * np.linalg.norm(v @ a, axis=1).max()


def turned(q: Array, probes: Array) -> Array:
    r = q.T - q
    if not r.any():
        return q
    r /= np.abs(r).max()
    slope, bend = np.trace(r @ q), np.trace(r @ r @ q)
    if slope <= 0:
        return q
    a = 1 / 8 / bound(r, probes)
    a = min(a, -slope / bend) if bend < 0 else a
    return q + a * (r @ q + a / 2 * r @ r @ q)


def moved(q: Array, t: Array, t2: float, old: float, plr: float, skew: bool, p: Probes):
    diagonal = q.ndim == 1
    steep = (t.max() if diagonal else bound(t, p(len(q)))) + t2
    scale = max(0.95 * old + 0.05 * steep, steep)
    if diagonal:
        m = 1 - plr / (1 if skew else 2) / scale * (t - t2)
        return q * (m if skew else m * m), scale
    m = np.eye(len(q)) - plr / (1 if skew else 2) / scale * (t - t2 * np.eye(len(q)))
    return (turned(m @ q, p(len(q))) if skew else m @ q @ m), scale


def times(q: Array, g: Array) -> Array:
    return q.T @ q @ g if q.ndim == 2 else (q**2)[:, None] * g


def matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    big = [n for n in shape if n != 1] or [1]
    if len(big) == 1:
        return tuple(big)
    cuts = [(int(np.prod(big[:i])), int(np.prod(big[i:]))) for i in range(1, len(big))]
    return min(cuts, key=lambda mn: max(mn) / min(mn))


class Naive:
    """One leaf. `grads` one by one into `direction`, which has a clip of its own for each layer.

    `normalize`: the momentum is divided by its norm, after its bias is taken off; True: by layer,
    "leaf": that of all layers."""

    def __init__(
        self,
        shape,
        scanned,
        skew,
        probes,
        block=16,
        largest=32,
        clip_together=False,
        normalize=False,
    ):
        self.normalize = normalize
        self.layers, self.inner = (shape[0], shape[1:]) if scanned else (1, shape)
        self.shape, self.skew, self.probes, self.together = shape, skew, probes, clip_together
        self.matrix = matrix(self.inner)
        self.diagonal = [len(self.matrix) == 1 or n > largest for n in self.matrix]
        cuts = [
            [slice(0, n)] if d else [slice(i, min(i + block, n)) for i in range(0, n, block)]
            for n, d in zip(self.matrix, self.diagonal, strict=True)
        ]
        self.blocks = (
            [(a, b) for a in cuts[0] for b in cuts[1]] if len(cuts) == 2 else [(cuts[0][0],)]
        )
        self.moment, self.t, self.state = np.zeros(shape), 0, {}

    def direction(self, grad: Array) -> Array:
        self.t += 1
        self.moment = 0.95 * self.moment + 0.05 * grad.astype(np.float64)
        g = (self.moment / (1 - 0.95**self.t)).reshape(self.layers, *self.matrix)
        if self.normalize:
            axes = None if self.normalize == "leaf" else tuple(range(1, g.ndim))
            norm = np.sqrt((g**2).sum(axis=axes, keepdims=True))
            g = g / (norm + 1e-6)
        plr = max(0.7 / np.sqrt(1 + self.t / 1e4), 0.4)
        out = np.zeros_like(g)
        for layer in range(self.layers):
            for where in self.blocks:
                out[layer][where] = self._block((layer, str(where)), g[layer][where], plr)
        axes = None if self.together else tuple(range(1, out.ndim))
        rms = np.sqrt((out**2).mean(axis=axes, keepdims=True))
        return (out * np.minimum(1, 1.1 / np.maximum(rms, 1e-300)) / 5).reshape(self.shape)

    def _block(self, name: object, g: Array, plr: float) -> Array:
        vector = g.ndim == 1
        g = g[:, None] if vector else g
        kinds = zip(g.shape, [*self.diagonal, True][:2], strict=True)
        start = [(np.ones(n) if d else np.eye(n), 0.0) for n, d in kinds]
        (ql, sl), (qr, sr) = self.state.get(name, start)
        if self.t % 100 == 0 and not vector:
            balance = np.sqrt(np.abs(qr).max() / np.abs(ql).max())
            ql, qr = ql * balance, qr / balance
        w = times(qr, times(ql, g).T).T
        (m, n), square = g.shape, w**2
        left = square.sum(1) if ql.ndim == 1 else w @ w.T
        right = square.sum(0) if qr.ndim == 1 else w.T @ w
        ql, sl = moved(ql, left, n, sl, plr, self.skew, self.probes)
        if not vector:
            qr, sr = moved(qr, right, m, sr, plr, self.skew, self.probes)
        self.state[name] = (ql, sl), (qr, sr)
        out = times(qr, times(ql, g).T).T
        return out[:, 0] if vector else out
