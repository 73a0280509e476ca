"""The PDM over whole texts against the mask as the paper writes it, which the tests of features
(tests/test_pdm_features.py) in turn hold against the running pipeline."""

from pathlib import Path

import pytest
import torch

from service.pdm.checkpoint import PdmConfig, build_pdm
from service.pdm.features import depth_types
from service.pdm.layout import Packed, newest_hidden
from service.target import load_target_config
from tests.test_pdm_features import CLOSE, CUTS, Cut, Observer, Target, observe
from tests.toys import ARCHITECTURES

FORMS = [
    {"layers": 1},
    {"layers": 1, "previous": 3},
    {"layers": 2},
    {"layers": 3, "previous": 2},
]


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.set_num_threads(1)
    return Target.make(tmp_path_factory.mktemp("target"), request.param)


def packed(observer: Observer, rows: list[list[list[int]]], size: int) -> Packed:
    """Texts side by side in rows of `size`, with room left at the ends."""
    anchors = list(observer.anchors)
    hidden = observer.target.model.config.hidden_size
    states = torch.zeros(len(rows), size, len(anchors), hidden)
    positions = torch.zeros(len(rows), size, dtype=torch.int64)
    texts = torch.full((len(rows), size), -1)
    number = 0
    for b, row in enumerate(rows):
        at = 0
        for text in row:
            place = slice(at, at + len(text))
            states[b, place] = observer.states(text)[anchors].transpose(0, 1)
            positions[b, place] = torch.arange(len(text))
            texts[b, place] = number
            at, number = at + len(text), number + 1
    return Packed(states, positions, texts, texts >= 0)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_same_as_the_mask(target: Target, tmp_path: Path, cut: Cut, form: dict) -> None:
    """Every fill, every position of the first text, the ends of texts beside it."""
    if "Llama" not in target.model.config.architectures[0] and cut not in CUTS[4:5]:
        pytest.skip("what differs between architectures does not depend on the cut")
    observer = observe(target, tmp_path, cut, **form)
    config = load_target_config(target.folder)
    pdm = build_pdm(
        PdmConfig.read(tmp_path), observer.tensors, config, torch.float32, torch.device("cpu")
    )
    known = target.known
    rows = [[known[0][:9], known[1][:7], known[2]], [known[2][3:10]]]
    types = depth_types(observer.anchors, observer.bounds)
    batch = packed(observer, rows, size=45)
    for fill in range(1, observer.n + 1):
        logits = pdm.logits(newest_hidden(pdm, batch, types, fill))
        at = 0
        for number, text in enumerate(text for row in rows for text in row):
            for t in range(len(text)):
                if number == 0 or t in (0, 1, len(text) - 1):
                    expected = observer.from_scratch(text[: t + 1], fill)
                    torch.testing.assert_close(logits[at + t], expected, **CLOSE)
            at += len(text)
        assert at == len(logits)
    observer.graph.close()


def test_only_what_is_wanted(target: Target, tmp_path: Path) -> None:
    observer = observe(target, tmp_path, (2, 2, 2), layers=2)
    config = load_target_config(target.folder)
    pdm = build_pdm(
        PdmConfig.read(tmp_path), observer.tensors, config, torch.float32, torch.device("cpu")
    )
    types = depth_types(observer.anchors, observer.bounds)
    batch = packed(observer, [[target.known[0]], [target.known[1]]], size=20)
    every = newest_hidden(pdm, batch, types, 2)
    wanted = batch.wanted & (batch.positions % 3 == 1)
    some = newest_hidden(pdm, Packed(batch.states, batch.positions, batch.texts, wanted), types, 2)
    torch.testing.assert_close(some, every[wanted[batch.wanted]], **CLOSE)
    observer.graph.close()
