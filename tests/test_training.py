"""Training methods through Lightning: reduction, modes, checkpoints, resuming, schedules."""

import csv
import math
from pathlib import Path

import lightning
import pytest
import torch
from families import tiny_model
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from word_models import word_model

from superpose.data.datamodule import StreamsDataModule
from superpose.data.sources import LocalText
from superpose.methods import schedules
from superpose.methods.callbacks import Progress
from superpose.methods.checkpoints import AtomicCheckpointIO, read_checkpoint
from superpose.methods.joint_contrastive import JointContrastive
from superpose.methods.pretrain import Pretrain
from superpose.methods.self_distillation import SelfDistillation
from superpose.methods.two_head import TwoHead
from superpose.models.layout import mixed_hidden, output_head
from superpose.models.loading import LanguageModel
from superpose.streams.batch import StreamBatch


@pytest.fixture
def source_folder(tmp_path):
    for document in range(6):
        numbers = torch.randint(0, 60, (200,), generator=torch.Generator().manual_seed(document))
        text = "".join(f" w{number}" for number in numbers.tolist())
        (tmp_path / f"{document}.txt").write_text(text, encoding="utf-8")
    return tmp_path


def datamodule(folder: Path, batch_size: int = 4, packing: str = "concat") -> StreamsDataModule:
    source = LocalText(
        f"{folder}/*.txt", length=8, packing=packing, batch_size=batch_size,
        validation_groups=6, validation_fraction=0.2,
    )  # fmt: skip
    return StreamsDataModule(source, word_model().tokenizer, 2, "dirichlet", 0.25, seed=3)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)


def distillation(model: LanguageModel | None = None, scheduler=schedules.constant, **settings):
    return SelfDistillation(
        model or word_model(),
        monitor="val/kl_nats",
        optimizer=adamw,
        scheduler=scheduler,
        **settings,
    )


def guide() -> LanguageModel:
    return word_model(seed=5)


def method_named(name: str, scheduler=schedules.constant):
    shared = {"monitor": "val/nll_nats", "optimizer": adamw, "scheduler": scheduler}
    if name == "distillation":
        return distillation(scheduler=scheduler)
    if name == "pretrain":
        return Pretrain(word_model(), **shared)
    if name == "two_head":
        return TwoHead(word_model(), num_streams=2, head_lr=1e-2, **shared)
    return JointContrastive(
        word_model(), head_lr=1e-2, guide=guide(), freeze_backbone=name == "posthoc", **shared
    )


METHODS = ("distillation", "pretrain", "joint_contrastive", "posthoc", "two_head")


def fit(method, data, max_steps, folder=None, accumulate=1, interval=None, **settings):
    """Train as the pipeline does; returns the trainer."""
    interval = (interval or max_steps) * accumulate
    callbacks = [Progress(), *settings.pop("callbacks", [])]
    resume = settings.pop("ckpt_path", None)
    if folder is not None:
        shared = {"auto_insert_metric_name": False, "enable_version_counter": False}
        callbacks += [
            ModelCheckpoint(folder, "best", monitor=method.monitor, **shared),
            ModelCheckpoint(folder, "last", **shared),
        ]
        settings["plugins"] = [AtomicCheckpointIO()]
        settings.setdefault("logger", CSVLogger(folder, name="", version=""))
    trainer = lightning.Trainer(
        callbacks=callbacks,
        accelerator="cpu", max_steps=max_steps, val_check_interval=interval,
        check_val_every_n_epoch=None, num_sanity_val_steps=0, accumulate_grad_batches=accumulate,
        use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=1, **{"logger": False, "enable_checkpointing": folder is not None, **settings},
    )  # fmt: skip
    trainer.fit(method, data, ckpt_path=resume, weights_only=True)
    return trainer


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def weights_of(method) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in method.parameters() if p.requires_grad])


class FirstGradient(lightning.Callback):
    """Keeps the gradients as the optimizer sees them at its first step."""

    gradient: torch.Tensor | None = None

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pass

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        grads = [p.grad.flatten() for p in pl_module.parameters() if p.grad is not None]
        if self.gradient is None and grads:
            self.gradient = torch.cat(grads).clone()


@pytest.mark.parametrize("packing", ["concat", "document"])
@pytest.mark.parametrize("name", METHODS)
def test_accumulation_does_not_change_the_gradient(source_folder, packing, name):
    if packing == "document":  # documents of unequal length: masks differ between batches
        for document in range(60):
            text = "".join(f" w{k}" for k in range(document % 7 + 1))
            (source_folder / f"short{document}.txt").write_text(text, encoding="utf-8")

    def gradient(batch_size: int, accumulate: int) -> torch.Tensor:
        method, keeper = method_named(name), FirstGradient()
        # retention is drawn per batch: without it both cuts see the same weights
        data = datamodule(source_folder, batch_size, packing)
        data.weights, data.retention = "uniform", 0.0
        fit(method, data, 2, accumulate=accumulate, callbacks=[keeper])
        assert keeper.gradient is not None
        return keeper.gradient

    whole, in_parts = gradient(8, 1), gradient(2, 4)
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(in_parts, whole, rtol=1e-4, atol=1e-6)


def test_joint_contrastive_gradient_is_that_of_the_plain_formula(source_folder):
    """Eq. 7 in float64 for N = 2: backbone, alpha and beta."""
    keeper, data = FirstGradient(), datamodule(source_folder)
    data.weights, data.retention = "uniform", 0.0
    batch = next(iter(data.train_dataloader()))
    fit(method_named("joint_contrastive"), data, 2, callbacks=[keeper])
    model, small = word_model().model.double(), guide().model.double()
    alpha, beta = (torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    mixed = model.get_input_embeddings()(batch.input_ids).mean(1)
    num_tokens = word_model().num_tokens  # the logits are wider: padding rows are no tokens
    large = model(inputs_embeds=mixed).logits[:, :-1, :num_tokens]
    with torch.no_grad():
        own = [small(input_ids=batch.input_ids[:, n]).logits[:, :-1, :num_tokens] for n in range(2)]
    losses = [
        torch.nn.functional.cross_entropy(
            (large + alpha * own[n] - beta * own[1 - n]).flatten(0, 1),
            batch.input_ids[:, n, 1:].flatten(),
        )
        for n in range(2)
    ]
    (sum(losses) / 2).backward()
    expected = [alpha.grad, beta.grad, *(q.grad for q in model.parameters() if q.grad is not None)]
    flat = torch.cat([g.flatten() for g in expected])
    assert keeper.gradient.shape == flat.shape
    assert alpha.grad.abs() > 1e-4
    torch.testing.assert_close(keeper.gradient.double(), flat, rtol=1e-3, atol=1e-6)


def test_two_head_balances_by_the_losses_of_the_last_step(source_folder):
    """G.2: EMA 0.99 from the first loss on, weights of power 5 in [0.1, 10] after 100 steps."""
    method = method_named("two_head")
    fit(method, datamodule(source_folder), 3)
    assert method.balance().tolist() == [1.0, 1.0]  # still warming up
    assert (method.average > 0).all()
    state = method.state_dict()
    assert torch.equal(state["average"], method.average)


def test_gradient_is_that_of_the_plain_formula(source_folder):
    keeper, model = FirstGradient(), word_model()
    data = datamodule(source_folder)
    batch = next(iter(data.train_dataloader()))
    fit(distillation(model, temperature=2.0), data, 2, callbacks=[keeper])
    student = word_model().model.double()
    teacher = word_model().model.double()
    mixed = student.get_input_embeddings()(batch.input_ids)
    mixed = (mixed * batch.weights[:, :, None, None].double()).sum(1)
    log_q = (student(inputs_embeds=mixed).logits / 2.0).log_softmax(-1)
    with torch.no_grad():
        streams = [teacher(input_ids=batch.input_ids[:, n]).logits / 2.0 for n in range(2)]
        p = sum(batch.weights[:, n, None, None] * s.softmax(-1) for n, s in enumerate(streams))
    loss = 4.0 * (p * (p.log() - log_q)).sum(-1).mean()
    loss.backward()
    expected = torch.cat([q.grad.flatten() for q in student.parameters() if q.grad is not None])
    torch.testing.assert_close(keeper.gradient.double(), expected, rtol=1e-3, atol=1e-6)


def test_loss_is_zero_at_the_start_with_one_hot_weights(source_folder):
    method = distillation()
    ids = torch.randint(0, 60, (3, 2, 8))
    weights = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    method.log = lambda *args, **kwargs: None
    method.eval()
    loss = method.training_step(StreamBatch(ids, torch.ones_like(ids), weights), 0)
    assert abs(loss.item()) < 1e-4
    with torch.no_grad():
        next(method.student.parameters()).add_(0.05)
    assert method.training_step(StreamBatch(ids, torch.ones_like(ids), weights), 0).item() > 1e-2


def test_teacher_stays_frozen_and_in_eval_mode(source_folder):
    gpt2 = tiny_model("gpt2")
    assert gpt2.config.resid_pdrop > 0
    method = distillation(LanguageModel(word_model("gpt2").model, word_model().tokenizer, "gpt2"))
    before = {k: v.clone() for k, v in method.teacher.state_dict().items()}
    student_before = weights_of(method)
    modes = []

    class Modes(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            modes.append((module.student.training, module.teacher.training))

    fit(method, datamodule(source_folder), 6, interval=2, callbacks=[Modes()])
    assert set(modes) == {(True, False)}
    method.train()
    assert method.student.training
    assert not method.teacher.training
    assert all(torch.equal(v, before[k]) for k, v in method.teacher.state_dict().items())
    assert not torch.equal(weights_of(method), student_before)
    assert not any(p.requires_grad for p in method.teacher.parameters())


def test_distillation_lowers_the_held_out_kl(source_folder, tmp_path):
    method = distillation()
    method.make_optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=5e-3)
    fit(method, datamodule(source_folder), 60, tmp_path / "run", interval=20)
    rows = read_csv(tmp_path / "run" / "metrics.csv")
    held_out = [float(row["val/kl_nats"]) for row in rows if row["val/kl_nats"]]
    assert len(held_out) == 3
    assert max(held_out[1:]) < 0.92 * held_out[0]
    columns = set(rows[0])
    assert {
        "train/kl_nats", "train/lr", "train/mixtures_per_second", "train/positions_per_second",
        "train/peak_memory_mb", "val/kl_nats", "val/kl_ratio", "val/top10",
    } <= columns  # fmt: skip


def test_validation_matches_brute_force(source_folder):
    method, data = distillation(), datamodule(source_folder)
    logged = {}
    method.log = lambda name, value, **kwargs: logged.__setitem__(name, float(value))
    data_batches = list(data.val_dataloader())
    with torch.no_grad():
        for number, batch in enumerate(data_batches):
            method.validation_step(batch, number)
        method.reduced_sums = lambda: method.sums
        method.on_validation_epoch_end()
        kl, kl_smooth, pair, hits, count = 0.0, 0.0, 0.0, 0, 0
        for batch in data_batches:
            mixed = output_head(method.student).logits(mixed_hidden(method.student, batch)).double()
            streams = [
                method.teacher(input_ids=batch.input_ids[:, n]).logits.double() for n in range(2)
            ]

            def target(tau, streams=streams):
                return sum((s / tau).softmax(-1) for s in streams) / 2

            for tau in (1.0, 1.5):
                p, log_q = target(tau), (mixed / tau).log_softmax(-1)
                value = float((p * (p.log() - log_q)).sum())
                kl, kl_smooth = (kl + value, kl_smooth) if tau == 1 else (kl, kl_smooth + value)
            a, b = ((s / 1.5).log_softmax(-1) for s in streams)
            pair += float(((a.exp() * (a - b)).sum() + (b.exp() * (b - a)).sum()) / 2)
            for s in streams:
                top = s[..., :61].argmax(-1)
                hits += int((mixed[..., :61].topk(10).indices == top[..., None]).any(-1).sum())
            count += batch.num_rows * batch.length
    assert logged["val/kl_nats"] == pytest.approx(kl / count, rel=1e-4)
    assert logged["val/kl_ratio"] == pytest.approx(kl_smooth / pair, rel=1e-4)
    assert logged["val/top10"] == pytest.approx(hits / (2 * count), abs=1e-9)


def test_checkpoint_holds_no_teacher_and_only_plain_values(source_folder, tmp_path):
    method = distillation()
    method.provenance = {"fingerprint": "abc"}
    fit(method, datamodule(source_folder), 4, tmp_path)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert all(key.startswith("student.") for key in checkpoint["state_dict"])
    assert checkpoint["superpose"] == {"fingerprint": "abc"}
    student = 4 * sum(p.numel() for p in method.student.parameters())
    assert (tmp_path / "last.ckpt").stat().st_size < 1.1 * 3 * student + 60_000
    assert b"omegaconf" not in (tmp_path / "last.ckpt").read_bytes()


def eager_plateau(*args, **kwargs):
    return schedules.plateau(*args, **kwargs, patience=0, factor=0.1)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("name", "scheduler"),
    [("distillation", eager_plateau), *((name, schedules.linear) for name in METHODS)],
)
def test_a_resumed_run_is_the_straight_run_to_the_bit(
    source_folder, tmp_path, accumulate, name, scheduler
):
    straight = method_named(name, scheduler)
    fit(straight, datamodule(source_folder), 8, tmp_path / "a", accumulate, interval=4)
    half = method_named(name, scheduler)
    stop = StopAt(4)
    fit(
        half, datamodule(source_folder), 8, tmp_path / "b", accumulate, interval=4, callbacks=[stop]
    )
    assert half.global_step == 4
    assert not torch.equal(weights_of(half), weights_of(straight))
    resumed = method_named(name, scheduler)
    fit(
        resumed, datamodule(source_folder), 8, tmp_path / "c", accumulate, interval=4,
        ckpt_path=tmp_path / "b" / "last.ckpt",
    )  # fmt: skip
    assert resumed.global_step == 8
    assert torch.equal(weights_of(resumed), weights_of(straight))

    def held_out(folder):
        rows = read_csv(tmp_path / folder / "metrics.csv")
        return [row[straight.monitor] for row in rows if row[straight.monitor]]

    assert held_out("c") == held_out("a")[1:]


class StopAt(lightning.Callback):
    def __init__(self, step):
        self.step = step

    def on_validation_end(self, trainer, module):
        if trainer.global_step >= self.step:
            trainer.should_stop = True


def test_last_is_the_last_even_if_the_metric_gets_worse(source_folder, tmp_path):
    class Worse(SelfDistillation):
        def on_validation_epoch_end(self):
            self.log_validation({"val/kl_nats": float(self.global_step)})

    method = Worse(
        word_model(), monitor="val/kl_nats", optimizer=adamw, scheduler=schedules.constant
    )
    fit(method, datamodule(source_folder), 6, tmp_path, interval=2)
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 6
    assert read_checkpoint(tmp_path / "best.ckpt")["global_step"] == 2


def test_resuming_with_another_order_of_the_data_is_refused(source_folder, tmp_path):
    fit(distillation(), datamodule(source_folder, batch_size=4), 2, tmp_path)
    with pytest.raises(ValueError, match=r"data.batch_size was 4 there and is 2 now"):
        fit(distillation(), datamodule(source_folder, batch_size=2), 4,
            ckpt_path=tmp_path / "last.ckpt", plugins=[AtomicCheckpointIO()])  # fmt: skip


def test_checkpoints_that_do_not_fit(source_folder, tmp_path):
    method = distillation()
    method.provenance = {"fingerprint": "abc"}
    fit(method, datamodule(source_folder), 2, tmp_path)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    other = distillation()
    other.provenance = {"fingerprint": "xyz"}
    with pytest.raises(ValueError, match="fingerprint abc, but .* has xyz"):
        other.on_load_checkpoint(checkpoint)
    gone = next(iter(checkpoint["state_dict"]))
    del checkpoint["state_dict"][gone]
    with pytest.raises(ValueError, match=f"1 weights are missing or unexpected, such as {gone}"):
        method.on_load_checkpoint(checkpoint)


def test_unreadable_checkpoints(source_folder, tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_checkpoint(tmp_path / "no.ckpt")
    fit(distillation(), datamodule(source_folder), 2, tmp_path)
    file = tmp_path / "last.ckpt"
    assert "superpose" in read_checkpoint(file)
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"\(3000 bytes\) cannot be read, it is truncated"):
        read_checkpoint(file)
    torch.save({"state_dict": {}}, file)
    with pytest.raises(ValueError, match="was not written by superpose"):
        read_checkpoint(file)


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    target = tmp_path / "last.ckpt"
    plugin = AtomicCheckpointIO()
    plugin.save_checkpoint({"superpose": {}, "value": 1}, target)

    def full_disk(obj, file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        plugin.save_checkpoint({"superpose": {}, "value": 2}, target)
    assert read_checkpoint(target)["value"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(
    source_folder, tmp_path
):
    method = distillation()

    class Break(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 5:
                with torch.no_grad():
                    next(module.student.parameters()).fill_(math.inf)

    with pytest.raises(
        ValueError, match=r"the loss became nan at step 5; the last good checkpoint"
    ):
        fit(method, datamodule(source_folder), 8, tmp_path, interval=2, callbacks=[Break()])
    state = read_checkpoint(tmp_path / "last.ckpt")
    assert state["global_step"] == 4
    assert all(torch.isfinite(v).all() for v in state["state_dict"].values())


def rates(scheduler, steps, **settings) -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = scheduler(optimizer, steps, **settings)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.per_step.step()
    return found


def test_schedules_follow_their_formulas():
    assert rates(schedules.constant, 4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(schedules.plateau, 4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(schedules.linear, 6, warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = rates(schedules.cosine, 5, warmup_steps=1, final_fraction=0.2)
    assert cosine[:2] == [1.0, 1.0]
    assert cosine[3] == pytest.approx(0.2 + 0.8 * 0.5)
    for scheduler in (schedules.linear, schedules.plateau):
        with pytest.raises(ValueError, match="warmup_steps must be at least 0, got -1"):
            rates(scheduler, 4, warmup_steps=-1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_plateau_steps_after_every_validation(source_folder, accumulate):
    class Constant(SelfDistillation):
        def on_validation_epoch_end(self):
            self.log_validation({"val/kl_nats": 1.0})

    def scheduler(*args, **kwargs):
        return schedules.plateau(*args, **kwargs, patience=0, factor=0.5, warmup_steps=2)

    method = Constant(word_model(), monitor="val/kl_nats", optimizer=adamw, scheduler=scheduler)
    trainer = fit(method, datamodule(source_folder), 8, interval=2, accumulate=accumulate)
    # four validations: the first sets the minimum, each later one halves the rate
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 / 8)


def test_progress_is_plain_lines_off_a_terminal(source_folder, caplog, capsys):
    caplog.set_level("INFO")
    fit(distillation(), datamodule(source_folder), 5, callbacks=[])
    lines = [r.message for r in caplog.records if r.message.startswith("step ")]
    assert lines[-1].startswith("step 5/5  train/kl_nats")
    assert "positions/s" in lines[-1]
    assert "\r" not in capsys.readouterr().err


def test_impossible_temperature():
    with pytest.raises(ValueError, match="method.temperature must be positive, got 0"):
        distillation(temperature=0)
