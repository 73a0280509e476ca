"""The graph of processes: the same text as the local one, and its failures."""

import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from service.messages import CyclePlan, GenerateRequest, Rows, Sampling
from service.pipeline.blueprint import Blueprint
from service.pipeline.graph import GraphError
from service.pipeline.local_graph import LocalGraph
from service.pipeline.process_graph import ProcessGraph, hosts
from service.pipeline.shared_tensors import SharedTensors
from service.text.grammar import GrammarTokens
from service.text.tokenizer import Tokenizer
from tests.toys import blueprint, generate, prompts_of, requests_of, texts_of, toy_target

STAGES = 2
EMPTY = CyclePlan(1, ((),) * STAGES, (), (), ())
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seeded=True, key=3),
    Sampling(temperature=1.0, key=4),  # q goes from the drafter to the last stage
    Sampling(temperature=0.8, top_p=0.9, key=5),
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Blueprint:
    return blueprint(toy_target(tmp_path_factory.mktemp("toy")), STAGES, pdm=True)


@pytest.fixture
def graph(toy: Blueprint):
    with closing(ProcessGraph(toy, chunk=8, cycle_timeout_s=60, cores=STAGES + 1)) as made:
        yield made


@pytest.fixture
def crowded(toy: Blueprint):
    """The drafter has no core of its own."""
    with closing(ProcessGraph(toy, chunk=8, cycle_timeout_s=60, cores=STAGES)) as made:
        yield made


def children() -> list[psutil.Process]:
    """The processes of a graph, as they were started: the stages, then the drafter."""
    ours = [
        p for p in psutil.Process().children() if any("process_actor" in a for a in p.cmdline())
    ]
    return sorted(ours, key=lambda p: (p.create_time(), p.pid))


def test_which_process_runs_what() -> None:
    assert hosts(2, drafts=True, cores=3) == [(0,), (1,), (2,)]
    assert hosts(2, drafts=True, cores=2) == [(0,), (1, 2)]
    assert hosts(3, drafts=True, cores=1) == [(0,), (1,), (2, 3)]
    assert hosts(2, drafts=False, cores=1) == [(0,), (1,)]


@pytest.mark.parametrize("name", ["graph", "crowded"])
def test_the_same_text_and_counts_as_the_local_graph(
    toy: Blueprint, name: str, request: pytest.FixtureRequest
) -> None:
    """Requests together and one after another, prompts in chunks, prefixes that are there."""
    graph = request.getfixturevalue(name)
    assert len(started := children()) == STAGES + (name == "graph")
    one = prompts_of([17])[0]
    requests = [
        *requests_of(prompts_of([3, 9, 17, 5]), 20, SAMPLINGS),
        GenerateRequest("like the third", (*one, 6), 12, Sampling(repetition_penalty=1.2)),
    ]
    made = []
    with closing(LocalGraph(toy)) as local:
        for other in (local, graph):
            for together in (True, False):
                how = {"stages": STAGES, "uses_pdm": True, "together": together, "slots": 2}
                made.append(generate(other, requests, **how))
    for local_made, other_made in zip(made[:2], made[2:], strict=True):
        assert texts_of(local_made) == texts_of(other_made)
        assert local_made.stats == other_made.stats
        assert [r.drafts for r in local_made.reports] == [r.drafts for r in other_made.reports]
    graph.close()
    assert not any(process.is_running() for process in started)


@pytest.mark.parametrize("name", ["graph", pytest.param("crowded", marks=pytest.mark.full)])
def test_looking_after_it(toy: Blueprint, name: str, request: pytest.FixtureRequest) -> None:
    """What is in the slots, whether all live, and an end at once."""
    graph = request.getfixturevalue(name)
    prompt = prompts_of([9])[0]
    generate(graph, requests_of([prompt], 5, None), stages=STAGES, uses_pdm=True)
    assert graph.audit({0: prompt, 1: []}, drafter=True) == []
    other = {0: [*prompt[:-1], prompt[-1] + 1]}
    assert graph.audit(other, drafter=False) == ["the last stage has another text in the slots [0]"]
    assert len(graph.audit(other, drafter=True)) == 2
    with closing(ProcessGraph(replace(toy, draft_ids=None), 8, 60)) as without:
        assert without.audit({0: []}, drafter=False) == []
    graph.check(1.0)
    processes = children()
    graph.kill()
    for process in processes:
        process.wait()
    with pytest.raises(GraphError, match="has died"):
        graph.check(1.0)


def run_often(graph: ProcessGraph) -> None:
    for _ in range(1000):
        graph.run(EMPTY)


@pytest.mark.parametrize("victim", [0, STAGES], ids=["stage", "drafter"])
def test_a_dead_process_is_a_graph_error(graph: ProcessGraph, victim: int) -> None:
    graph.run(EMPTY)
    children()[victim].kill()
    with pytest.raises(GraphError, match="has died"):
        run_often(graph)  # it lives on for a moment


def test_the_death_of_a_shared_process_names_both(crowded: ProcessGraph) -> None:
    crowded.run(EMPTY)
    children()[1].kill()
    with pytest.raises(GraphError, match=r"stage 1 or the drafter has died|a stage or the drafter"):
        run_often(crowded)


def test_an_exception_names_its_cause(graph: ProcessGraph) -> None:
    impossible = CyclePlan(7, ((), (Rows(0, 0),)), (), (), ())  # no stage has sent this row
    with pytest.raises(GraphError, match=r"stage 1 failed: .*that no stage has sent"):
        graph.run(impossible)


def test_a_hung_process_is_noticed_and_ended(toy: Blueprint) -> None:
    graph = ProcessGraph(toy, chunk=8, cycle_timeout_s=0.5)
    graph.run(EMPTY)
    os.kill(children()[1].pid, signal.SIGSTOP)
    with pytest.raises(GraphError, match=r"took more than 0\.5 s"):
        graph.run(EMPTY)
    began = time.monotonic()
    graph.close()
    assert time.monotonic() - began < 15
    assert not children()


def test_what_can_not_be_built_is_a_graph_error(tmp_path: Path) -> None:
    gone = blueprint(toy_target(tmp_path / "toy"), STAGES)
    (tmp_path / "toy" / "model.safetensors").unlink()
    with pytest.raises(GraphError, match=r"could not be built: stage \d failed"):
        ProcessGraph(gone, chunk=8, cycle_timeout_s=60)
    assert not children()


def test_shared_tensors() -> None:
    """Two descriptors of one memory, as a writer and a reader in two processes have."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * 64)
    writer, reader = SharedTensors(fd, 64), SharedTensors(fd, 64)
    os.close(fd)
    first, second = torch.arange(8.0).view(2, 4), torch.arange(32, dtype=torch.bfloat16)
    told = writer.put(first), writer.put(None), writer.put(second)
    assert torch.equal(reader.get(told[0]), first)  # of the cycle before
    assert told[1] is None
    assert reader.get(None) is None
    found = reader.get(told[2])
    assert torch.equal(found, second)
    writer.put(first)
    writer.put(first)
    assert torch.equal(found, second), "what was got is the reader's own"
    with pytest.raises(ValueError, match="a tensor of 68 bytes is sent, 64 are there"):
        writer.put(torch.zeros(17))


def test_actors_need_no_transformers(toy: Blueprint, default_model: Path, tmp_path: Path) -> None:
    """Importing it takes each process of a pipeline seconds, at every start and restart; grammars
    too come without it."""
    tokens = GrammarTokens.of(default_model, Tokenizer.load(default_model), 49_152)
    (tmp_path / "told").write_bytes(pickle.dumps((toy, tokens)))
    program = """
import pickle, sys
from service.messages import Grammar
from service.pipeline.process_actor import HostedActor
from service.text.grammar import Grammars
made, tokens = pickle.load(open(sys.argv[1], "rb"))
assert Grammars(tokens).follow(Grammar("regex", "no")).allowed(()).any()
actors = [HostedActor(made, index, ()) for index in range(3)]
sys.exit("transformers" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "told")]
    assert subprocess.run(command, check=False).returncode == 0
