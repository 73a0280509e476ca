"""Which decoder layers each stage holds. Pure functions."""

from itertools import accumulate

from service.config import ConfigError


def balanced_layers(layers: int, stages: int, head_cost: float = 0.0) -> tuple[int, ...]:
    """Number of layers of each stage, so that the costliest stage is as cheap as can be.

    A layer costs 1; `head_cost` is the final norm and head's, in layers, which the last stage bears
    (the embedding, a look-up, costs nothing). Each stage has at least one layer.
    """
    if stages > layers:
        raise ConfigError(
            f"pipeline.stages is {stages}, but the model has {layers} decoder layers; a stage "
            "needs at least one"
        )
    counts = [1] * stages
    extra = [0.0] * (stages - 1) + [head_cost]
    for _ in range(layers - stages):
        cheapest = min(range(stages), key=lambda k: counts[k] + extra[k])
        counts[cheapest] += 1
    return tuple(counts)


def check_layers(counts: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """The layer list of the settings, if it covers the model."""
    if sum(counts) != layers:
        raise ConfigError(
            f"pipeline.layers is {list(counts)}, which is {sum(counts)} layers; the model has "
            f"{layers}"
        )
    return counts


def stage_bounds(counts: tuple[int, ...]) -> tuple[int, ...]:
    """a(0), ..., a(n): how many layers a token has behind it after each number of stages."""
    return (0, *accumulate(counts))
