"""The ways to decode that `benchmarks.chat` sets against each other."""

from dataclasses import dataclass, field
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

    @property
    def uses_ray(self) -> bool:
        return self.kind == "http" or (self.kind == "engine" and self._pipeline["graph"] == "ray")

    @property
    def stages(self) -> int:
        """Of an engine."""
        return int(self._pipeline["stages"])

    @property
    def speculates(self) -> bool:
        return self.kind == "engine" and self.settings["drafter"]["kind"] != "off"

    def is_baseline_of(self, other: "Way") -> bool:
        """Whether it is the other one's plain form: one stage, the same precision."""
        if not self.kind == other.kind == "engine" or self.stages > 1 or self.speculates:
            return False
        return bool(self.settings["weights"] == other.settings["weights"])

    @property
    def _pipeline(self) -> dict[str, Any]:
        pipeline: dict[str, Any] = self.settings["pipeline"]
        return pipeline


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
    """Every way: the headline's baseline, what is set against it, and then the rest."""
    spd, http = "lookup+pdm", "HTTP, "
    baseline = _engine(model, 1, "off", "local")
    ways = [
        baseline,
        _engine(model, 2, "off", "local"),
        local := _engine(model, 2, spd, "local"),
        _engine(model, 1, "off", "local", "int8"),
        _engine(model, 2, spd, "local", "int8"),
        ray := _engine(model, 2, spd, "ray"),
        *(_engine(model, 3, drafter, "local") for drafter in ("off", spd)),
        _engine(model, 3, spd, "ray"),
    ]
    for t in sorted({1, cores}):
        ways += [
            Way(f"transformers, {t} threads", "transformers", threads=t),
            Way(f"transformers, lookup, {t} threads", "transformers", threads=t, lookup=True),
            Way(f"llama.cpp, {t} threads", "llama.cpp", threads=t),
        ]
    ways += [_engine(model, 2, "off", "ray")]
    return ways + [Way(http + w.name, "http", w.settings) for w in (baseline, local, ray)]


def _engine(model: str, stages: int, drafter: str, graph: str, weights: str | None = None) -> Way:
    name = f"n={stages} {drafter}, {graph}" + (f", {weights}" if weights else "")
    return Way(name, "engine", deployment(model, stages, drafter, graph, weights))
