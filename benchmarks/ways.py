"""The ways to decode that `benchmarks.chat` sets against each other."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["engine", "http", "transformers", "llama.cpp"]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode a chat. `settings`: a deployment's, for the first two kinds."""

    name: str
    kind: Kind
    settings: dict[str, Any] = field(default_factory=dict)
    threads: int = 1  # of transformers and llama.cpp
    lookup: bool = False  # transformers' prompt lookup

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def deployment(
    model: str, stages: int, drafter: str, graph: str, weights: str | None = None
) -> dict[str, Any]:
    """A deployment for one chat at a time."""
    return {
        "model": model,
        "weights": weights,
        "pipeline": {"graph": graph, "stages": stages, "slots": 1, "max_len": 2048},
        "drafter": {"kind": drafter},
    }


def all_ways(model: str, cores: int) -> list[Way]:
    """Every way, the headline's baseline first."""
    threads = sorted({1, cores})
    ways = [_engine(model, 1, "off", "local")]
    for n in (2, 3):
        for drafter in ("off", "lookup+pdm"):
            ways += [_engine(model, n, drafter, graph) for graph in ("local", "ray")]
    ways += [
        _engine(model, 1, "off", "local", "int8"),
        _engine(model, 2, "lookup+pdm", "local", "int8"),
    ]
    ways += [_engine(model, 2, "lookup+pdm", "ray", "int8")]
    ways += [
        Way(f"HTTP, {way.name}", "http", way.settings)
        for way in ways
        if way.name in ("n=1 off, local", "n=2 lookup+pdm, local", "n=2 lookup+pdm, ray")
    ]
    for t in threads:
        ways.append(Way(f"transformers, {t} threads", "transformers", threads=t))
        ways.append(
            Way(f"transformers, lookup, {t} threads", "transformers", threads=t, lookup=True)
        )
    ways += [Way(f"llama.cpp, {t} threads", "llama.cpp", threads=t) for t in threads]
    return ways


def _engine(model: str, stages: int, drafter: str, graph: str, weights: str | None = None) -> Way:
    name = f"n={stages} {drafter}, {graph}" + (f", {weights}" if weights else "")
    return Way(name, "engine", deployment(model, stages, drafter, graph, weights))
