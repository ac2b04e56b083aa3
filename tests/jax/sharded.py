"""Run by test_jax_sharding.py with eight devices: prints one line of JSON for each scenario."""

import contextlib
import json
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import isokron.jax

# `with mesh:` is deprecated, and still used
warnings.filterwarnings("ignore", category=DeprecationWarning)

# told on stderr before the one program that XLA warns of, so that its silence means something
CANARY = "what follows is moved badly"
SHAPES = {"w": (48, 32), "stack": (3, 16, 16), "bias": (24,)}
SPECS = {"w": P("x", None), "stack": P(None, "y", "x"), "bias": P("x")}
FLAGS = {"w": False, "stack": True, "bias": False}
COMMON = {"block_size": 16, "stacked": FLAGS}
# method, axis types, how the mesh is set, axis of the blocks, whether specs are given
SCENARIOS = {
    "auto": ("quad", "Auto", "set_mesh", "x", False),
    "auto, skew, specs": ("skew", "Auto", "set_mesh", "x", True),
    "auto, no axis": ("quad", "Auto", "set_mesh", None, False),
    "auto, with": ("quad", "Auto", "with", "x", False),
    "auto, nothing set": ("quad", "Auto", "nothing", "x", True),
    "explicit": ("quad", "Explicit", "set_mesh", "x", False),
    "explicit, skew, specs": ("skew", "Explicit", "set_mesh", "y", True),
    "explicit, with": ("quad", "Explicit", "with", "x", False),
    "explicit, nothing set": ("quad", "Explicit", "nothing", "x", False),
}


def trees() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    random = np.random.default_rng(0)

    def draw() -> dict[str, Any]:
        return {name: random.standard_normal(s).astype("f") for name, s in SHAPES.items()}

    return draw(), [draw() for _ in range(3)]


def walk(optimizer: Any, params: Any, grads: list[Any], state: Any) -> tuple[Any, Any, int]:
    @jax.jit
    def step(params: Any, state: Any, grad: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    # not the size of the cache: P("x") and P("x", None) have two entries, and one program
    compiled: list[str] = []
    for grad in grads:
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
        )
        params, state = step(params, state, grad)
        jax.monitoring.clear_event_listeners()
    return params, state, len(compiled)


def scenario(name: str, alone: dict[str, Any]) -> dict[str, Any]:
    method, types, how, axis, specs = SCENARIOS[name]
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType[types],) * 2)
    put = {leaf: NamedSharding(mesh, spec) for leaf, spec in SPECS.items()}
    host, host_grads = trees()
    params = jax.device_put(host, put)
    grads = [jax.device_put(grad, put) for grad in host_grads]
    factory = getattr(isokron.jax, method)
    settings = COMMON | {"pipeline_axis_name": axis, "learning_rate": optax.constant_schedule(0.01)}
    settings |= {"params_partition_specs": SPECS} if specs else {}
    contexts = {"set_mesh": jax.set_mesh, "with": lambda mesh: mesh}
    with contexts.get(how, lambda _: contextlib.nullcontext())(mesh):
        optimizer = factory(**settings)
        found = isokron.jax.get_opt_state_partition_specs(params, factory, **settings)
        expected = jax.tree.map(lambda spec: NamedSharding(mesh, spec), found)
        eager = optimizer.init(params)
        # an explicit mesh is known to jit without being told
        told = {} if types == "Explicit" else {"out_shardings": expected}
        state = jax.jit(optimizer.init, **told)(params)
        after, state, compiled = walk(optimizer, params, grads, state)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
    error = max(float(np.max(np.abs(after[leaf] - alone[method][leaf]))) for leaf in SHAPES)
    blocks = state[0].blocks["16x16"]["factor.0"]
    return {
        "error": error,
        "same structure": jax.tree.structure(eager) == jax.tree.structure(found),
        "state moved": sum(not a.sharding.is_equivalent_to(s, a.ndim) for a, s in pairs),
        "params moved": sum(
            not after[leaf].sharding.is_equivalent_to(put[leaf], after[leaf].ndim)
            for leaf in SHAPES
        ),
        "blocks": blocks.shape[0],
        "blocks on a device": blocks.addressable_shards[0].data.shape[0],
        "compiled": compiled,
    }


def main() -> None:
    params, grads = trees()
    alone = {}
    for method in ("quad", "skew"):
        optimizer = getattr(isokron.jax, method)(0.01, **COMMON)
        params = jax.tree.map(jnp.asarray, params)
        alone[method] = walk(optimizer, params, grads, optimizer.init(params))[0]
    for name in SCENARIOS:
        print(json.dumps({"name": name} | scenario(name, alone)), flush=True)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        for given in ({"pipeline_axis_name": "z"}, {"pipeline_axis_size": 3}):
            try:
                isokron.jax.quad(**({"pipeline_axis_name": "x"} | given)).init(params)
            except ValueError as error:
                print(json.dumps({"name": next(iter(given)), "message": str(error)}))
    print(CANARY, file=sys.stderr, flush=True)
    moved = NamedSharding(mesh, P(None, None, ("x", "y")))
    start = jax.device_put(np.ones((8, 8, 16), "f"), NamedSharding(mesh, P("x", "y")))
    jax.jit(lambda x: jax.lax.with_sharding_constraint(x + 1, moved).sum(0))(start)


if __name__ == "__main__":
    sys.exit(main())
