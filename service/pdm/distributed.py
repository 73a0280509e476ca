"""Training in several processes that share each step, by Ray Train: a GPU each where there are
some, else CPUs."""

from typing import Any

import torch
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer

from service.pdm.fit import Job, fit


def fit_distributed(job: Job, processes: int) -> None:
    """As `fit`. Each worker reads the corpus and takes its share of the batches; the first one
    scores and writes."""
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"job": job},
        scaling_config=ScalingConfig(num_workers=processes, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=str(job.out.resolve() / "ray")),
    )
    trainer.fit()


def _worker(config: dict[str, Any]) -> None:
    context = get_context()
    fit(config["job"], context.get_world_rank(), context.get_world_size())
