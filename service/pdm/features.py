"""Which hidden states the PDM sees of a token. Pure functions of anchors and stage bounds.

An anchor is an index of hidden states: 0 is the embedding's output, j the raw output of decoder
layer j, so L stands before the final norm. (arXiv 2605.30852, section on feature aggregation.)
"""

from collections.abc import Sequence


def default_anchors(layers: int, stages: int) -> tuple[int, ...]:
    """The paper's anchors for one width: 0, L/n, 3L/n, 6L/n, L-1, within [0, L], each once."""
    wanted = [0, *(layers * k // stages for k in (1, 3, 6)), layers - 1]
    return tuple(sorted({min(max(a, 0), layers) for a in wanted}))


def shared_anchors(layers: int, widths: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Anchors for pipelines of several widths, given by their stage bounds: where stages end, but
    none within a sixth of the layers behind another, and L-1 and L."""
    ends = sorted({b for bounds in widths for b in bounds if 0 < b < layers - 1})
    chosen = [0]
    for end in ends:
        if end - chosen[-1] >= layers / 6:
            chosen.append(end)
    return tuple(sorted({*chosen, layers - 1, layers}))


def type_of_depth(anchors: Sequence[int], bounds: Sequence[int], depth: int) -> int:
    """The type of a token that has finished `depth` stages: how many anchors it has, less one."""
    return sum(a <= bounds[depth] for a in anchors) - 1


def depth_types(anchors: Sequence[int], bounds: Sequence[int]) -> tuple[int, ...]:
    """The type of each depth 0..n in a pipeline with these stage bounds."""
    return tuple(type_of_depth(anchors, bounds, d) for d in range(len(bounds)))


def reachable_types(anchors: Sequence[int], bounds: Sequence[int]) -> tuple[int, ...]:
    """The types that occur in a pipeline with these stage bounds, ascending."""
    return tuple(sorted(set(depth_types(anchors, bounds))))


def tapped_stages(anchors: Sequence[int], bounds: Sequence[int]) -> list[bool]:
    """Whether each stage taps anything."""
    return [bool(stage_anchors(anchors, bounds, k)) for k in range(len(bounds) - 1)]


def stage_anchors(anchors: Sequence[int], bounds: Sequence[int], stage: int) -> tuple[int, ...]:
    """The anchors that a stage taps: those in (a(stage), a(stage + 1)]."""
    return tuple(a for a in anchors if bounds[stage] < a <= bounds[stage + 1])
