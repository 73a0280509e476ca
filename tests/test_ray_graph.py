"""The graph of actors: the same text as the local one, its failures, and the order in which GPUs
would send and receive."""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable

import pytest
import ray
from ray.dag import ClassMethodNode
from ray.dag.dag_node_operation import (
    _add_edge,
    _DAGNodeOperation,
    _DAGNodeOperationType,
    _DAGOperationGraphNode,
    _generate_actor_to_execution_schedule,
)

from service.config import PipelineSettings
from service.messages import CyclePlan, GenerateRequest, Rows, Sampling
from service.pipeline.graph import GraphError
from service.pipeline.local_graph import LocalGraph
from service.pipeline.ray_graph import RayGraph, wire
from tests.toys import (
    VOCABULARY,
    blueprint,
    generate,
    prompts_of,
    requests_of,
    texts_of,
    toy_target,
)

STAGES = 3


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return blueprint(toy_target(tmp_path_factory.mktemp("toy")), STAGES, pdm=True)


def make(toy, **settings) -> RayGraph:
    return RayGraph(toy, PipelineSettings(stages=STAGES, chunk=8, **settings))


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seeded=True, key=3),
    Sampling(temperature=1.0, key=4),  # q travels from the drafter to the last stage
    Sampling(temperature=0.8, top_p=0.9, key=5),
]


def test_the_same_text_as_the_local_graph(cluster, toy) -> None:  # noqa: ARG001
    requests = requests_of(prompts_of([3, 9, 17, 5]), 20, SAMPLINGS)
    texts = []
    for graph in (LocalGraph(toy), make(toy)):
        for alone in (True, False):
            batches = [[r] for r in requests] if alone else [requests]
            made = [generate(graph, b, stages=STAGES, uses_pdm=True) for b in batches]
            texts.append([text for m in made for text in texts_of(m)])
        graph.close()
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_what_a_request_can_ask_for_travels(cluster, toy) -> None:  # noqa: ARG001
    """Penalties, a bias for every token, log-probabilities with many alternatives, those of a
    prompt, and prefixes that are there already: as in the local graph, and tear-down is quick, as
    it is not where a message has outgrown its buffer."""
    bias = tuple((i, i % 7 / 10) for i in range(VOCABULARY))
    sampling = Sampling(1.0, presence_penalty=0.5, logit_bias=bias, seeded=True, key=3)
    one, other = prompts_of([17, 9])
    requests = [
        GenerateRequest("a", tuple(one), 12, sampling, logprobs=20, prompt_logprobs=True),
        GenerateRequest("b", (*one, 5), 12, sampling, logprobs=20),
        GenerateRequest("c", tuple(other), 12, Sampling(1.0, key=4, min_p=0.1)),
        GenerateRequest("d", (*one, 6), 12, Sampling(repetition_penalty=1.2)),
    ]
    both = []
    for graph in (LocalGraph(toy), make(toy)):
        made = generate(graph, requests, stages=STAGES, uses_pdm=True, together=False, slots=2)
        began = time.monotonic()
        graph.close()
        assert time.monotonic() - began < 5
        both.append(made)
    local, remote = both
    assert local.tokens == remote.tokens
    assert local.stats == remote.stats
    assert [s.cached for s in local.stats.values()] == [
        0,
        16,
        0,
        17,
    ]  # b does not wait for the 17th
    assert local.prompt_logprobs == remote.prompt_logprobs
    assert len(local.prompt_logprobs["a"]) == 16
    assert local.logprobs == remote.logprobs


EMPTY = CyclePlan(1, ((),) * STAGES, (), (), ())
ONE_ROW = CyclePlan(1, ((Rows(0, 0),), *((),) * (STAGES - 1)), ((5,),), (), ())


def run_often(graph: RayGraph) -> None:
    for _ in range(1000):
        graph.run(ONE_ROW)


@pytest.mark.parametrize("victim", ["stage", "drafter"])
def test_a_dead_actor_is_a_graph_error(cluster, toy, victim) -> None:  # noqa: ARG001
    graph = make(toy)
    graph.run(ONE_ROW)
    ray.kill(graph.stages[1] if victim == "stage" else graph.drafter)
    with pytest.raises(GraphError, match="in cycle 1 a stage or the drafter failed"):
        run_often(graph)  # an actor lives on for a moment after `ray.kill`
    began = time.monotonic()
    graph.close()
    assert time.monotonic() - began < 5


def test_an_exception_names_its_cause(cluster, toy) -> None:  # noqa: ARG001
    graph = make(toy)
    impossible = CyclePlan(7, ((), (Rows(0, 0),), ()), (), (), ())  # no stage has sent this row
    with pytest.raises(GraphError, match=r"in cycle 7 .*rows are planned that no stage has sent"):
        graph.run(impossible)
    graph.close()


def test_a_hung_actor_is_noticed(cluster, toy) -> None:  # noqa: ARG001
    graph = make(toy, cycle_timeout_s=0.5)
    graph.run(EMPTY)
    pid = ray.get(graph.stages[1].__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(GraphError, match=r"cycle 1 took more than 0\.5 s"):
        graph.run(EMPTY)
    graph.close()


def test_what_can_not_be_built_is_a_graph_error(cluster, toy, tmp_path) -> None:  # noqa: ARG001
    gone = blueprint(toy_target(tmp_path / "toy"), STAGES)
    (tmp_path / "toy" / "model.safetensors").unlink()
    with pytest.raises(GraphError, match="the pipeline could not be built"):
        make(gone)


@ray.remote(num_cpus=0)
class Wired:
    """The methods of stages and drafter, by name."""

    def forward(self, plan): ...
    def draft(self, plan): ...
    def send(self, output): ...
    def accept(self, plan, *rest): ...
    def accept_q(self, plan, q): ...
    def report_after(self, *done): ...


def schedules(
    stages: int, with_drafter: bool, tapped: Callable[[int], bool]
) -> dict[str, list[str]]:
    """In what order each actor reads, computes and writes, by Ray's own scheduler, as if the edges
    were NCCL's (which Ray refuses to compile without GPUs)."""
    actors = [Wired.remote() for _ in range(stages + with_drafter)]
    names = {a._ray_actor_id: f"stage {k}" for k, a in enumerate(actors[:stages])}
    names |= {a._ray_actor_id: "drafter" for a in actors[stages:]}
    drafter = actors[stages] if with_drafter else None
    output = wire(actors[:stages], drafter, [tapped(k) for k in range(stages)], "nccl")
    nodes: list = []

    def collect(node):
        if isinstance(node, ClassMethodNode) and node not in nodes:
            nodes.append(node)
        return node

    output.apply_recursive(collect)
    nodes.sort(key=lambda node: node._get_bind_index())
    index = {node: i for i, node in enumerate(nodes)}
    kinds = _DAGNodeOperationType
    graph, own = {}, defaultdict(list)
    for node, i in index.items():
        actor = node._get_actor_handle()
        reads = any(up.type_hint.requires_accelerator() for up in node._upstream_nodes)
        needs = {kinds.READ: reads, kinds.WRITE: node.type_hint.requires_accelerator()}
        place = len(own[actor._ray_actor_id])
        graph[i] = {
            kind: _DAGOperationGraphNode(
                _DAGNodeOperation(place, kind, node.get_method_name()),
                i,
                actor,
                needs.get(kind, False),
            )
            for kind in (kinds.READ, kinds.COMPUTE, kinds.WRITE)
        }
        own[actor._ray_actor_id].append(graph[i])
    for tasks in own.values():
        for before, task in zip([None, *tasks], tasks, strict=False):
            _add_edge(task[kinds.READ], task[kinds.COMPUTE])
            _add_edge(task[kinds.COMPUTE], task[kinds.WRITE])
            if before is not None:
                _add_edge(before[kinds.COMPUTE], task[kinds.COMPUTE], "", True)
    for node, i in index.items():
        for up in node._upstream_nodes:
            if up not in index:
                continue  # the plan
            write, read = graph[index[up]][kinds.WRITE], graph[i][kinds.READ]
            _add_edge(write, read)
            if write.requires_accelerator:
                for end in (write, read):
                    end.sync_idxs.update({(index[up], kinds.WRITE), (i, kinds.READ)})
    made = _generate_actor_to_execution_schedule(graph)
    return {
        names[actor._ray_actor_id]: [
            f"{op.operation.method_name} {op.operation.type.name}" for op in operations
        ]
        for actor, operations in made.items()
    }


@pytest.mark.parametrize("with_drafter", [True, False])
@pytest.mark.parametrize("tapped", [lambda _: True, lambda k: k % 3 == 0], ids=["all", "some"])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_on_gpus_all_forwards_come_before_any_message(
    cluster,  # noqa: ARG001
    stages,
    with_drafter,
    tapped,
) -> None:
    """Stages that wait for each other's messages before they compute would run one by one."""
    made = schedules(stages, with_drafter, tapped)
    assert len(made) == stages + with_drafter
    for name, operations in made.items():
        first = "draft" if name == "drafter" else "forward"
        assert operations[:2] == [f"{first} READ", f"{first} COMPUTE"]
        computed = [op for op in operations if op.endswith("COMPUTE")]
        assert computed[-1] == "report_after COMPUTE"
