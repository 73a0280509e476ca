"""A toy in a deployment of its own, and its processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from service.pipeline.process_graph import hosts
from tests.chaos.streams import MODEL
from tests.serving import Served, serve, wait_until_ready
from tests.toys import toy_chat_target

WATCHDOG_S = 8.0
PROCESS = "process_actor"  # in the command of those that `graph: local` starts
# What `serve deploy` asks of the dashboard, which `serve run` does not start.
DEPLOY = """
import sys, ray, yaml
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
ray.init(address="auto", namespace="serve", log_to_driver=False)
schema = ServeDeploySchema.model_validate(yaml.safe_load(open(sys.argv[1])))
_get_global_client().deploy_apps(schema)
"""


def make_toy(folder: Path, default_model: Path) -> Path:
    return toy_chat_target(folder, default_model, layers=6, max_position_embeddings=4096)


@contextmanager
def deployment(
    log: Path, target: Path, *, replicas: int = 1, graph: str = "ray", **limits: Any
) -> Iterator["Deployment"]:
    orders = log.parent / "orders"
    orders.mkdir(exist_ok=True)
    args = {
        "model": str(target),
        "served_model_name": MODEL,
        "pipeline": {
            "graph": graph,
            "replicas": replicas,
            "stages": 2,
            "slots": 8,
            "max_len": 1024,
            "cpus_per_actor": 0.05,
            "cycle_timeout_s": WATCHDOG_S,
        },
        "api": {"keep_alive_s": 0.5},
        "limits": {"max_restarts": 1000, **limits},
    }
    with serve(log, args, import_path="tests.chaos.app:build", SPD_CHAOS=str(orders)) as served:
        yield Deployment(served, orders, graph, replicas)


class Deployment:
    """A running deployment whose processes can be found."""

    def __init__(self, served: Served, orders: Path, graph: str, replicas: int) -> None:
        self.served, self.url, self._orders = served, served.url, orders
        self.graph, self.replicas = graph, replicas

    def pids(self, title: str) -> list[int]:
        """The processes of this deployment with a title, such as `StageActor`, oldest first."""
        mark = f"SPD_TEST_DEPLOYMENT={self.url.rpartition(':')[2]}\0".encode()
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in environ.read_bytes():
                    command = (environ.parent / "cmdline").read_text()
                    if title in command and (command.startswith("ray::") or PROCESS in command):
                        found.append(int(environ.parent.name))
            except OSError:
                continue
        return sorted(found)

    def signal(self, title: str, which: int, sign: signal.Signals) -> None:
        pids = self.pids(title)
        os.kill(pids[which % len(pids)], sign)

    def order(self, place: str, text: str = "chaos") -> None:
        """An exception at a place, in whichever process comes there first."""
        partial = self._orders / f"{place}.partial"
        partial.write_text(text)
        partial.rename(self._orders / place)

    def deploy(self, **args: Any) -> None:
        """Deploys the configuration with other `args`, as an operator does with a running one."""
        file = self.served.log.with_suffix(".yaml")
        config = yaml.safe_load(file.read_text())
        config["applications"][0]["args"].update(args)
        file.write_text(yaml.safe_dump(config))
        subprocess.run([sys.executable, "-c", DEPLOY, str(file)], check=True, timeout=120)

    def wait_until_whole(self, most: float = 120) -> None:
        """Until all pipelines are there, and serve."""
        each = {"ServeReplica:spd:Pipeline": 1, "DrafterActor": 1}  # processes of a pipeline
        if self.graph == "local":
            cores = len(os.sched_getaffinity(0))
            each = {
                "ServeReplica:spd:Pipeline": 1,
                PROCESS: len(hosts(2, drafts=True, cores=cores)),
            }
        wanted = {title: count * self.replicas for title, count in each.items()}
        deadline = time.monotonic() + most
        while time.monotonic() < deadline:
            if {title: len(self.pids(title)) for title in wanted} == wanted:
                break
            time.sleep(0.2)
        wait_until_ready(self.served)

    def withdraw(self) -> None:
        for file in self._orders.iterdir():
            file.unlink()
