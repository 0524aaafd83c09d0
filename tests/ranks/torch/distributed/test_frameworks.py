"""Lightning's Fabric and Trainer, and Hugging Face Accelerate, on the backend "ronde"."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ports import free_port
from tests.ranks.torch.distributed.groups import BACKENDS, same
from tests.ranks.torch.distributed.transformer import LENGTH, WORDS, loss_of, sgd, transformer, values

from ronde.testing import ranks

pytestmark = pytest.mark.slow


def loader() -> Any:
    words = torch.randint(WORDS, (24, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return torch.utils.data.DataLoader(words, batch_size=4)


def fabric(backend: str, folder: str) -> list[Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend=backend, cluster_environment=TorchElasticEnvironment())
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    assert dist.get_backend() == backend
    model = transformer()
    model, optimizer = fabric.setup(model, sgd(model))
    for index, batch in enumerate(fabric.setup_dataloaders(loader())):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            fabric.backward(loss_of(model, batch))
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert fabric.broadcast({"rank": fabric.global_rank}) == {"rank": 0}
    return [
        *values(model),
        fabric.all_gather(torch.tensor([float(fabric.global_rank)])),
        fabric.all_reduce(torch.tensor([fabric.global_rank + 1.0]), reduce_op="sum"),
    ]


def trainer(backend: str, folder: str) -> list[Any]:
    import lightning
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = transformer()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = loss_of(self.model, batch)
            self.log("loss", loss, sync_dist=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return sgd(self.model)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        default_root_dir=folder,
        strategy=DDPStrategy(process_group_backend=backend, cluster_environment=TorchElasticEnvironment()),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, loader())
    assert dist.get_backend() == backend
    return [*values(module.model), trainer.callback_metrics["loss"]]


def accelerate(backend: str, folder: str) -> list[Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import gather_object

    dist.init_process_group(backend)  # which Accelerate takes
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert (accelerator.num_processes, dist.get_backend()) == (2, backend)
    model = transformer()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert gather_object([accelerator.process_index]) == [0, 1]
    accelerator.wait_for_everyone()
    return [
        *values(model),
        accelerator.gather(torch.tensor([accelerator.process_index])),
        accelerator.reduce(torch.tensor([1.0 + accelerator.process_index]), "mean"),
    ]


def compare(name: str, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = {}
    for backend in BACKENDS:
        results[backend] = globals()[name](backend, folder)
        dist.destroy_process_group()
    same(results["ronde"], results["gloo"])


@pytest.mark.parametrize("program", [fabric, trainer, accelerate])
def test_the_same_parameters_as_with_gloo(program: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate" if program is accelerate else "lightning")
    environ = dict(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        TORCHELASTIC_RUN_ID="1",
        ACCELERATE_USE_CPU="true",
    )
    ranks.run(compare, 2, program.__name__, str(tmp_path), environ=environ, timeout_s=250)
