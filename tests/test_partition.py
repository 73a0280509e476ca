"""Where the target is cut, and which hidden states the PDM sees for it. Pure functions."""

import re
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.config import ConfigError
from service.pdm.features import default_anchors, reachable_types, stage_anchors, type_of_depth
from service.pipeline.partition import balanced_layers, check_layers, stage_bounds

# --- layers -------------------------------------------------------------------------------------


def all_cuts(layers: int, stages: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in pairwise((0, *cut, layers))) for cut in cuts]


def costliest(counts: tuple[int, ...], head_cost: float) -> float:
    return max([*counts[:-1], counts[-1] + head_cost])


@pytest.mark.parametrize("head_cost", [0.0, 0.3, 1.0, 1.5, 2.49, 7.0, 40.0])
def test_no_cut_has_a_cheaper_costliest_stage(head_cost: float) -> None:
    for layers in range(1, 12):
        for stages in range(1, layers + 1):
            counts = balanced_layers(layers, stages, head_cost)
            assert len(counts) == stages
            assert sum(counts) == layers
            assert min(counts) >= 1
            best = min(costliest(c, head_cost) for c in all_cuts(layers, stages))
            assert costliest(counts, head_cost) == best


@pytest.mark.parametrize(
    ("layers", "stages", "head_cost", "counts"),
    [
        (30, 1, 5.0, (30,)),
        (30, 2, 0.0, (15, 15)),
        (30, 5, 0.0, (6, 6, 6, 6, 6)),
        (30, 4, 0.0, (8, 8, 7, 7)),
        (30, 2, 6.0, (18, 12)),
        (30, 3, 6.0, (12, 12, 6)),
        (30, 3, 8.0, (13, 13, 4)),
        (30, 5, 20.0, (8, 7, 7, 7, 1)),
        (6, 6, 3.0, (1, 1, 1, 1, 1, 1)),
    ],
)
def test_balanced_layers(
    layers: int, stages: int, head_cost: float, counts: tuple[int, ...]
) -> None:
    assert balanced_layers(layers, stages, head_cost) == counts


def test_more_stages_than_layers() -> None:
    message = "pipeline.stages is 7, but the model has 6 decoder layers; a stage needs at least one"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        balanced_layers(6, 7)


def test_a_list_of_layers() -> None:
    assert check_layers((4, 1, 1), 6) == (4, 1, 1)
    message = "pipeline.layers is [4, 1, 2], which is 7 layers; the model has 6"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_layers((4, 1, 2), 6)


def test_bounds() -> None:
    assert stage_bounds((6,)) == (0, 6)
    assert stage_bounds((4, 1, 1)) == (0, 4, 5, 6)


# --- anchors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "stages", "anchors"),
    [
        (30, 5, (0, 6, 18, 29, 30)),  # 6L/n is beyond the model
        (30, 2, (0, 15, 29, 30)),  # and so is 3L/n
        (30, 3, (0, 10, 29, 30)),  # 3L/n is L
        (30, 6, (0, 5, 15, 29, 30)),
        (32, 8, (0, 4, 12, 24, 31)),
        (32, 16, (0, 2, 6, 12, 31)),
        (32, 4, (0, 8, 24, 31, 32)),
        (30, 1, (0, 29, 30)),
        (6, 6, (0, 1, 3, 5, 6)),
        (7, 2, (0, 3, 6, 7)),
        (2, 2, (0, 1, 2)),
        (1, 1, (0, 1)),
    ],
)
def test_default_anchors(layers: int, stages: int, anchors: tuple[int, ...]) -> None:
    assert default_anchors(layers, stages) == anchors


def test_default_anchors_are_lawful() -> None:
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            anchors = default_anchors(layers, stages)
            assert anchors[0] == 0
            assert anchors[-1] <= layers
            assert all(a < b for a, b in pairwise(anchors))
            assert set(anchors) <= {
                0, layers // stages, 3 * layers // stages, 6 * layers // stages, layers - 1, layers
            }  # fmt: skip


@pytest.mark.parametrize(
    ("anchors", "bounds", "types"),
    [
        ((0, 6, 18, 29, 30), (0, 6, 12, 18, 24, 30), [0, 1, 1, 2, 2, 4]),
        ((0, 15, 29, 30), (0, 15, 30), [0, 1, 3]),
        ((0, 4, 12, 24, 31), tuple(range(0, 33, 4)), [0, 1, 1, 2, 2, 2, 3, 3, 4]),
        ((0,), (0, 3, 6), [0, 0, 0]),
        ((0, 3, 5), (0, 1, 2, 6), [0, 0, 0, 2]),
        ((0, 1, 2, 6), (0, 5, 6), [0, 2, 3]),
    ],
)
def test_types(anchors: tuple[int, ...], bounds: tuple[int, ...], types: list[int]) -> None:
    assert [type_of_depth(anchors, bounds, d) for d in range(len(bounds))] == types
    assert reachable_types(anchors, bounds) == tuple(sorted(set(types)))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Anchors and stage bounds of a model of up to 12 layers."""
    layers = draw(st.integers(1, 12))
    anchors = draw(st.sets(st.integers(1, layers)))
    cuts = draw(st.sets(st.integers(1, layers)))
    return (0, *sorted(anchors)), tuple(sorted({0, layers} | cuts))


@settings(derandomize=True, deadline=None)
@given(pipelines())
def test_a_stage_taps_what_deepens_the_type(
    pipeline: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    """The anchors of a token of depth d are 0 and all that stages 0..d-1 have tapped."""
    anchors, bounds = pipeline
    stages = len(bounds) - 1
    for depth in range(stages + 1):
        tapped = [a for k in range(depth) for a in stage_anchors(anchors, bounds, k)]
        kind = type_of_depth(anchors, bounds, depth)
        assert [0, *tapped] == list(anchors[: kind + 1])
        assert all(a <= bounds[depth] for a in anchors[: kind + 1])
        assert all(a > bounds[depth] for a in anchors[kind + 1 :])
    everything = [a for k in range(stages) for a in stage_anchors(anchors, bounds, k)]
    assert everything == [a for a in anchors[1:] if a <= bounds[-1]]


def test_a_stage_never_taps_the_embedding() -> None:
    for stages, layers in product(range(1, 7), [6]):
        bounds = stage_bounds(balanced_layers(layers, stages))
        anchors = default_anchors(layers, stages)
        assert all(0 not in stage_anchors(anchors, bounds, k) for k in range(stages))
