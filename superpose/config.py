"""Schemas of the Hydra groups: a typo or a wrong type fails when the config is composed.

Every field says what it is and its unit. Values are checked where they are used, with the same
message from Hydra and from Python.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class ModelConfig:
    """Group ``model``: which weights, from where."""

    path: str = MISSING  # hub id or local folder; "tiny" is the packaged teacher
    revision: str | None = None  # hub revision: branch, tag or commit
    gguf_file: str | None = None  # a GGUF file inside path
    dtype: str = "float32"  # of the teacher; a student is always trained in float32
    random_init: bool = False  # draw fresh weights (by `seed`) instead of reading them
    num_blocks: int | None = None  # keep the first blocks only, with the final norm and head
    learning_rate: float = 1e-4  # peak rate that suits a student of this model


@dataclass
class GuideConfig:
    """Group ``guide``: the small model of Joint Contrastive decoding; of the backbone's tokens."""

    path: str = MISSING  # hub id or local folder; "tiny-guide" is the packaged one
    revision: str | None = None
    gguf_file: str | None = None  # a GGUF file inside path
    dtype: str = "float32"
    # guide=truncated: the first blocks of path, as `method=pretrain model=truncated` trained them
    num_blocks: int | None = None


@dataclass
class StreamsConfig:
    """Group ``streams``: how many texts are mixed, and with which weights."""

    num_streams: int = 2  # N
    weights: str = "uniform"  # of a training row: uniform (the paper) or dirichlet
    retention: float = 0.25  # fraction of training rows that are one-hot (0 in the paper)


@dataclass
class MeasuredStreamsConfig(StreamsConfig):
    """Group ``streams`` of an evaluation."""

    num_streams: Any = 2  # N, or for suite=superposition a list of them, [2,3,4]


@dataclass
class DataConfig:
    """What all entries of group ``data`` share."""

    _target_: str = MISSING
    length: int = 64  # T, tokens of a block
    packing: str = "document"  # document (one block each, padded) or concat (no padding)
    min_length: int = 2  # with packing=document, documents of fewer tokens are left out
    batch_size: int = 8  # B, rows of a batch; each holds N blocks
    num_workers: int = 0  # processes that prepare batches
    validation_groups: int = 64  # groups of the validation during training


@dataclass
class StoriesConfig(DataConfig):
    """``data=stories``: the embedded generator."""

    _target_: str = "superpose.data.sources.Stories"


@dataclass
class TextConfig(DataConfig):
    """``data=text``: local files."""

    _target_: str = "superpose.data.sources.LocalText"
    packing: str = "concat"
    path: str = MISSING  # file, folder or quoted glob of .txt, .jsonl or .parquet
    text_column: str = "text"  # of .jsonl and .parquet rows
    sample_by: str = "document"  # a document of a .txt file: document (the file), paragraph, line
    validation_fraction: float = 0.05  # held-out fraction of every document; evaluations set 1


@dataclass
class StreamedConfig(DataConfig):
    """``data=fineweb`` and others: read through `datasets` in streaming mode."""

    _target_: str = "superpose.data.streaming.StreamedText"
    path: str = MISSING  # hub id, or local files
    name: str | None = None  # configuration of the hub data set
    split: str = "train"
    revision: str | None = None
    text_column: str = "text"
    validation_documents: int = 1000  # the first documents of the stream, held out
    shuffle_buffer: int = 4096  # blocks from which groups are drawn


@dataclass
class OptimizerConfig:
    """Group ``method/optimizer``: AdamW."""

    _target_: str = "torch.optim.AdamW"
    _partial_: bool = True
    lr: float = 1e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    fused: bool = True  # one pass over the parameters; same result, faster


@dataclass
class SchedulerConfig:
    """Group ``method/scheduler``: what all schedules share."""

    _target_: str = MISSING
    _partial_: bool = True
    warmup_steps: int = 0  # optimizer steps of linear warm-up


@dataclass
class DecayConfig(SchedulerConfig):
    """``method/scheduler=linear`` and ``cosine``."""

    final_fraction: float = 0.0  # of the peak learning rate, at trainer.max_steps


@dataclass
class PlateauConfig(SchedulerConfig):
    """``method/scheduler=plateau``: the paper's; steps after every validation."""

    _target_: str = "superpose.methods.schedules.plateau"
    patience: int = 10  # validations without improvement
    factor: float = 0.5


@dataclass
class MethodConfig:
    """What all entries of group ``method`` share."""

    _target_: str = MISSING
    monitor: str = MISSING  # the metric that picks the best checkpoint; minimised
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: Any = None


@dataclass
class PretrainConfig(MethodConfig):
    """``method=pretrain``: next-token loss on single texts."""

    _target_: str = "superpose.methods.pretrain.Pretrain"
    monitor: str = "val/nll_nats"


@dataclass
class SelfDistillationConfig(MethodConfig):
    """``method=self_distillation``: KL(mixture of teachers || student on the mixed input)."""

    _target_: str = "superpose.methods.self_distillation.SelfDistillation"
    monitor: str = "val/kl_nats"
    temperature: float = 1.0  # of both distributions in the training loss (2 in the paper)


@dataclass
class JointContrastiveConfig(MethodConfig):
    """``method=joint_contrastive``: each stream's next token, told apart by a guide (eq. 7)."""

    _target_: str = "superpose.methods.joint_contrastive.JointContrastive"
    monitor: str = "val/nll_nats"
    head_lr: float = 1e-2  # peak learning rate of alpha and beta
    freeze_backbone: bool = False  # fit alpha and beta only: the post-hoc variant (G.1)


@dataclass
class TwoHeadConfig(MethodConfig):
    """``method=two_head``: projected streams and one output head a stream (G.2)."""

    _target_: str = "superpose.methods.two_head.TwoHead"
    monitor: str = "val/nll_nats"
    num_streams: int = 2  # ${streams.num_streams}
    head_lr: float = 1e-3  # peak learning rate of mixers and heads


@dataclass
class TrainerConfig:
    """Group ``trainer``: arguments of ``lightning.Trainer``; steps are optimizer steps."""

    _target_: str = "lightning.Trainer"
    accelerator: str = "auto"
    devices: int = 1  # per node
    num_nodes: int = 1
    strategy: str = "auto"
    precision: str = "32-true"  # or bf16-mixed
    max_steps: int = 1200
    val_check_interval: int = 200  # optimizer steps between validations
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = 1.0  # norm
    log_every_n_steps: int = 10
    deterministic: bool = True


@dataclass
class CsvLoggerConfig:
    """``logger=csv``: metrics.csv in the run's folder."""

    _target_: str = "lightning.pytorch.loggers.CSVLogger"
    save_dir: str | None = "${output_dir}"
    name: str = ""
    version: str = ""


@dataclass
class WandbLoggerConfig:
    """``logger=wandb``: offline unless WANDB_API_KEY is set or `offline` is false."""

    _target_: str = "superpose.methods.loggers.wandb_logger"
    save_dir: str | None = "${output_dir}"
    project: str = "superpose"
    name: str | None = None
    offline: bool | None = None  # null: offline if there is no key


@dataclass
class TensorBoardLoggerConfig:
    """``logger=tensorboard``: event files in the run's folder."""

    _target_: str = "lightning.pytorch.loggers.TensorBoardLogger"
    save_dir: str | None = "${output_dir}"
    name: str = "tensorboard"
    version: str = ""


@dataclass
class LoggersConfig:
    """Group ``logger``: metrics.csv always, and others beside it, ``logger=[csv,wandb]``."""

    csv: CsvLoggerConfig = field(default_factory=CsvLoggerConfig)  # always written
    wandb: WandbLoggerConfig | None = None
    tensorboard: TensorBoardLoggerConfig | None = None


@dataclass
class CheckpointCallbackConfig:
    """A checkpoint in ``checkpoints/``, written after validations."""

    _target_: str = "lightning.pytorch.callbacks.ModelCheckpoint"
    dirpath: str = "${output_dir}/checkpoints"
    filename: str = MISSING
    monitor: str | None = None  # null: every validation
    mode: str = "min"
    save_top_k: int = 1
    auto_insert_metric_name: bool = False  # a metric's slash would make a folder
    enable_version_counter: bool = False


@dataclass
class ProgressCallbackConfig:
    """A bar on a terminal, plain lines elsewhere; speed and memory are logged."""

    _target_: str = "superpose.methods.callbacks.Progress"
    every_steps: int = 20  # optimizer steps between plain lines


@dataclass
class TrajectoryCallbackConfig:
    """Weights alone, as Hugging Face folders, after 0, 1, 2, 4, 8, ... steps and the last."""

    _target_: str = "superpose.methods.callbacks.Trajectory"
    folder: str = "${output_dir}/trajectory"


@dataclass
class CallbacksConfig:
    """Group ``callbacks``."""

    best: CheckpointCallbackConfig = field(default_factory=CheckpointCallbackConfig)
    last: CheckpointCallbackConfig | None = None
    progress: ProgressCallbackConfig | None = field(default_factory=ProgressCallbackConfig)
    trajectory: TrajectoryCallbackConfig | None = None  # method=pretrain sets it


@dataclass
class SuperpositionSettings:
    """``suite=superposition``: how close a mixed pass comes to the ideal mixture."""

    _target_: str = "superpose.suites.run.superposition"
    limit: int | None = 256  # groups of N texts, the first ones; null is all
    batch_size: int = 8  # groups of one forward pass; no result depends on it
    temperature: float = 1.5  # smoothing of every distribution, for KL and JS only
    top_k: int = 256  # tokens kept on each side of the Wasserstein distance
    # positions of each group, drawn by seed, at which the optimal transport is solved exactly
    # (about 15 ms a pair of distributions); null is every position, 0 leaves the distance out
    wasserstein_positions: int | None = 8
    seed: int = 0  # of that draw


@dataclass
class PatchedLambadaSettings:
    """``suite.lambada`` of ``suite=attention_patching``."""

    examples: int = 200  # the first ones, an even number; 0 leaves LAMBADA out
    length: int = 128  # tokens of a context, at most; the left is cut
    path: str | None = None  # .jsonl as for suite=lambada; null: the data's own cloze set


@dataclass
class AttentionPatchingSettings:
    """``suite=attention_patching``: mixing against wrong and against scrambled attention."""

    _target_: str = "superpose.suites.run.attention_patching"
    limit: int | None = 48  # groups of 3 texts, the first ones; null is all
    batch_size: int = 4  # groups of one forward pass; no result depends on it
    temperature: float = 1.5  # smoothing of every distribution, for KL only
    seed: int = 0  # of the permutations
    lambada: PatchedLambadaSettings = field(default_factory=PatchedLambadaSettings)


@dataclass
class LambadaSettings:
    """``suite=lambada``: predict the last word of a passage, read alone and read mixed."""

    _target_: str = "superpose.suites.run.lambada"
    limit: int | None = None  # examples, the first ones; null is all
    batch_size: int = 16  # rows of one forward pass; no result depends on it
    length: int = 128  # tokens of a context in the mixed pass, at most; the left is cut
    # of every decoder but the raw one, greedy continuations of the first groups' contexts, for the
    # Jaccard overlap of the streams
    continuation_groups: int = 32  # groups; 0 leaves it out
    continuation_tokens: int = 32
    path: str | None = None  # .jsonl of {"text"} or {"context", "continuation"}; null: dataset
    # hub id or folder with a column "text"; null: the data's own cloze set, if it has none
    # EleutherAI/lambada_openai
    dataset: str | None = None
    revision: str | None = None  # hub revision of dataset
    split: str = "test"  # of dataset


@dataclass
class PerplexitySettings:
    """``suite=perplexity``: single-stream negative log-likelihood of the blocks of ``data``."""

    _target_: str = "superpose.suites.run.perplexity"
    limit: int | None = None  # texts (blocks), the first ones; null is all
    batch_size: int = 16  # texts of one forward pass; no result depends on it


@dataclass
class AdditivitySettings:
    """``suite=additivity``: is the state of a mixture the sum of its texts' states (eq. 8)?"""

    _target_: str = "superpose.suites.run.additivity"
    limit: int | None = 64  # groups of N texts, the first ones; null is all
    batch_size: int = 8  # groups of one forward pass, N + 1 rows each; no result depends on it
    # hub branches ([step0,step1000]), or steps of the trajectory of a method=pretrain run given as
    # checkpoint; or all. They are loaded one at a time; null is the model itself
    revisions: Any = None


@dataclass
class LayerLinearitySettings:
    """``suite=layer_linearity``: how linear each block is, from its input to its output (App. F)."""

    _target_: str = "superpose.suites.run.layer_linearity"
    limit: int | None = 128  # texts (blocks), the first ones; null is all
    batch_size: int = 16  # texts of one forward pass; no result depends on it
    revisions: Any = None  # as in AdditivitySettings


@dataclass
class GenerationSettings:
    """``suite=generation``: N continuations from one mixed pass, side by side."""

    _target_: str = "superpose.suites.run.generation"
    # N texts, or groups of N; null: the prompts of `path`, or else the first words of `data`
    prompts: list[Any] | None = None
    path: str | None = None  # .txt with a prompt a line, or .jsonl of {"text"} or {"prompt"}
    limit: int | None = 8  # groups of N prompts, the first ones; null is all
    batch_size: int = 8  # groups of one forward pass
    prompt_tokens: int = 16  # of a text of `data`
    decoder: str | None = None  # raw, guided, joint or two_head; null: the last that applies
    max_new_tokens: int = 64
    do_sample: bool = False  # draw; otherwise the most probable token
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0  # of the draws


@dataclass
class ThroughputSettings:
    """``suite=throughput``: tokens a second of N streams in one pass, and of N ordinary ones."""

    _target_: str = "superpose.suites.run.throughput"
    prompt_length: int = 128  # tokens of every prompt; longer texts are cut
    generation_length: int = 64  # new tokens of every stream; no EOS stops it
    groups: list[int] = field(default_factory=lambda: [1])  # G, groups of N streams read at once
    repeats: int = 5  # of every mode; intervals are over them
    warmup: int = 1  # repeats that are not counted
    # raw, separate, guided, batch, sequential, guide_batch; null is all that apply
    modes: list[str] | None = None


@dataclass
class TrainConfig:
    """``python train.py``: everything that a run needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    guide: GuideConfig | None = None
    streams: StreamsConfig = field(default_factory=StreamsConfig)
    data: Any = None
    method: Any = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggersConfig = field(default_factory=LoggersConfig)
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    suites: dict[str, Any] = field(default_factory=dict)  # measured before and after training
    checkpoint: str | None = None  # a run folder or .ckpt to go on from
    resume: bool = False  # continue that run (weights, optimizer, schedule, data position)
    seed: int = 0
    output_dir: str | None = None  # the run's folder; Hydra's, unless called from Python


@dataclass
class EvaluateConfig:
    """``python evaluate.py``: suites on one model or checkpoint."""

    model: ModelConfig = field(default_factory=ModelConfig)
    guide: GuideConfig | None = None  # for guided decoding; a checkpoint brings its own
    streams: MeasuredStreamsConfig = field(default_factory=MeasuredStreamsConfig)
    data: Any = None
    suite: Any = None
    suites: dict[str, Any] = field(default_factory=dict)  # of suite=[NAME,NAME], by name
    checkpoint: str | None = None  # a run folder, a .ckpt or an export folder
    seed: int = 0
    output_dir: str | None = None  # the run's folder; Hydra's, unless called from Python


def register() -> None:
    """Make the schemas known to Hydra; the YAML files of ``conf/`` name them in their defaults."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig)
    store.store(name="evaluate_schema", node=EvaluateConfig)
    for group, name, node in (
        ("data", "base_stories", StoriesConfig),
        ("data", "base_text", TextConfig),
        ("data", "base_streamed", StreamedConfig),
        ("method", "base_pretrain", PretrainConfig),
        ("method", "base_self_distillation", SelfDistillationConfig),
        ("method", "base_joint_contrastive", JointContrastiveConfig),
        ("method", "base_two_head", TwoHeadConfig),
        ("method/scheduler", "base_scheduler", SchedulerConfig),
        ("method/scheduler", "base_decay", DecayConfig),
        ("method/scheduler", "base_plateau", PlateauConfig),
        ("suite", "base_superposition", SuperpositionSettings),
        ("suite", "base_lambada", LambadaSettings),
        ("suite", "base_generation", GenerationSettings),
        ("suite", "base_additivity", AdditivitySettings),
        ("suite", "base_layer_linearity", LayerLinearitySettings),
        ("suite", "base_attention_patching", AttentionPatchingSettings),
        ("suite", "base_perplexity", PerplexitySettings),
        ("suite", "base_throughput", ThroughputSettings),
    ):
        store.store(group=group, name=name, node=node)
