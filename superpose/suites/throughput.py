"""``suite=throughput``: new tokens a second, of N streams in one pass and of N ordinary ones (G.5).

Every mode runs the same greedy loop over the same prompts, with the same code: an ordinary batch is
a mixed pass of one stream a row. Nothing stops at an EOS, so all modes make equally many tokens, and
what the tokens are does not matter. Each repeat runs every mode once, so that a ratio compares two
runs of the same minute; the order rotates, so that no mode always follows the same other one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from superpose.config import ThroughputSettings
from superpose.data.groups import Group
from superpose.decoding.generate import Tokens, check_num_streams
from superpose.decoding.mixed_pass import MixedPass
from superpose.decoding.raw import Decoder, Raw
from superpose.decoding.two_head import TwoHead
from superpose.models.layout import blocks, output_head
from superpose.models.loading import LanguageModel
from superpose.suites.batching import check_at_least_one
from superpose.suites.peak_memory import peak_memory_bytes
from superpose.suites.progress import Progress, silent
from superpose.suites.throughput_result import ModeRuns, StepWork, ThroughputResult

MODES = ("raw", "separate", "guided", "batch", "sequential", "guide_batch")
NEEDS_GUIDE = ("guided", "guide_batch")
Clock = Callable[[], float]


@dataclass(frozen=True)
class Pass:
    """One greedy decoding: a model, how its streams are told apart, and ``[group][stream]``."""

    model: LanguageModel
    decoder: Decoder
    prompts: Tokens


@dataclass(frozen=True)
class Decoded:
    """What one or several passes took and made.

    Attributes:
        prefill_seconds: until the first new token.
        decode_seconds: from there to the last one.
        cache_bytes: KV caches at the end, those of a guide included.
        token_ids: the new tokens of every pass, ``[pass][group][stream][position]``.
    """

    prefill_seconds: float
    decode_seconds: float
    cache_bytes: int
    token_ids: list[Tokens]


def throughput(
    model: LanguageModel,
    groups: Sequence[Group],
    decoders: Sequence[Decoder],
    settings: ThroughputSettings,
    progress: Progress = silent,
    clock: Clock = time.perf_counter,
) -> ThroughputResult:
    """Measure every mode at every number of groups.

    The modes, for G groups of N prompts:

    - ``raw``: one mixed pass a group; the N streams share its logits and get the same token.
    - ``separate``: one mixed pass a group, a head of its own for each stream (Table 9's separate).
    - ``guided``: one mixed pass a group, and the guide on all N G prompts (Table 9's guided).
    - ``batch``: an ordinary batch of the N G prompts.
    - ``sequential``: the N streams one after the other, each an ordinary batch of its G prompts;
      with one group, prompt by prompt.
    - ``guide_batch``: the guide alone on that batch of N G prompts.

    Args:
        model: the model that reads the mixture.
        groups: N prompts each, of ``settings.prompt_length`` tokens or more, which are cut.
        decoders: the last one with a guide and the last two_head are measured. Without a two_head
            ``separate`` gets mixers and heads at their start, copies of the model's head: they read
            and compute what trained ones do.
        settings: see :class:`superpose.config.ThroughputSettings`.
        progress: wraps the rounds.
        clock: seconds.

    Raises:
        ValueError: for settings out of range, too few or too short prompts, more positions than a
            model has, an unknown mode or one that does not apply.
    """
    guided = next((d for d in reversed(decoders) if d.guide is not None), None)
    names = chosen_modes(settings, guided is not None)
    check_settings(settings)
    check_positions(
        model, guided.guide if guided and set(names) & set(NEEDS_GUIDE) else None, settings
    )
    prompts = prompts_of(groups, settings)
    num_streams = len(prompts[0])
    two_head = _two_head(model, decoders, num_streams) if "separate" in names else None
    for name, decoder in (("guided", guided), ("separate", two_head)):
        if decoder is not None and name in names:
            check_num_streams(decoder, num_streams)
    works = step_works(model, num_streams, two_head, guided.guide if guided else None)
    runs = []
    for count in settings.groups:
        passes = passes_of(model, prompts[:count], two_head, guided)
        runs += _measure({name: passes[name] for name in names}, settings, progress, clock)
    return ThroughputResult(
        runs,
        works,
        {
            "num_streams": num_streams,
            "prompt_length": settings.prompt_length,
            "generation_length": settings.generation_length,
            "repeats": settings.repeats,
        },
    )


def chosen_modes(settings: ThroughputSettings, has_guide: bool) -> list[str]:
    """The modes asked for, or all that apply, in the order of :data:`MODES`.

    Raises:
        ValueError: for an unknown mode, or one that needs a guide where there is none.
    """
    apply = [name for name in MODES if has_guide or name not in NEEDS_GUIDE]
    if settings.modes is None:
        return apply
    for name in settings.modes:
        if name not in MODES:
            raise ValueError(f"suite.modes has {name!r}, expected some of {', '.join(MODES)}")
        if name not in apply:
            raise ValueError(
                f"suite.modes has {name!r}, which needs a guide; add guide=NAME, or leave it out"
            )
    if not settings.modes:
        raise ValueError("suite.modes is empty; give some modes, or null for all that apply")
    return [name for name in apply if name in settings.modes]


def check_settings(settings: ThroughputSettings) -> None:
    """Raise ValueError for settings out of range."""
    check_at_least_one(
        prompt_length=settings.prompt_length,
        generation_length=settings.generation_length,
        repeats=settings.repeats,
    )
    counts = list(settings.groups)
    if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
        raise ValueError(
            f"suite.groups must be different numbers of at least 1, such as [1,4,16], got {counts}"
        )
    if settings.warmup < 0:
        raise ValueError(f"suite.warmup must be at least 0, got {settings.warmup}")


def check_positions(
    model: LanguageModel, guide: LanguageModel | None, settings: ThroughputSettings
) -> None:
    """Raise ValueError if prompt and new tokens go beyond the position limit of a reader."""
    wanted = settings.prompt_length + settings.generation_length - 1  # the last one is not read
    for reader in filter(None, (model, guide)):
        limit = reader.max_length
        if limit is not None and wanted > limit:
            raise ValueError(
                f"suite.prompt_length={settings.prompt_length} and suite.generation_length="
                f"{settings.generation_length} ask for more than the {limit} positions of "
                f"{reader.name}; together they may be {limit + 1}"
            )


def prompts_of(groups: Sequence[Group], settings: ThroughputSettings) -> Tokens:
    """The first ``prompt_length`` token ids of every text, ``[group][stream]``.

    Raises:
        ValueError: for fewer groups than asked for, or a shorter text.
    """
    if len(groups) < max(settings.groups):
        raise ValueError(
            f"suite.groups={list(settings.groups)} needs {max(settings.groups)} groups of texts, but "
            f"the data gives {len(groups)}; give more text, or fewer groups"
        )
    length = settings.prompt_length
    shortest = min(int(group.attention_mask.sum(dim=1).min()) for group in groups)
    if shortest < length:
        raise ValueError(
            f"suite.prompt_length={length}, but the data's texts have as few as {shortest} tokens; "
            f"set data.length={length} data.packing=concat, or suite.prompt_length={shortest}"
        )
    return [group.input_ids[:, :length].tolist() for group in groups]


def passes_of(
    model: LanguageModel, prompts: Tokens, two_head: TwoHead | None, guided: Decoder | None
) -> dict[str, list[Pass]]:
    """The passes of each mode that there can be, to be run one after the other."""
    alone = [[stream] for group in prompts for stream in group]
    by_stream = [[[group[n]] for group in prompts] for n in range(len(prompts[0]))]
    passes = {
        "raw": [Pass(model, Raw(), prompts)],
        "batch": [Pass(model, Raw(), alone)],
        "sequential": [Pass(model, Raw(), part) for part in by_stream],
    }
    if two_head is not None:
        passes["separate"] = [Pass(model, two_head, prompts)]
    if guided is not None and guided.guide is not None:
        passes["guided"] = [Pass(model, guided, prompts)]
        passes["guide_batch"] = [Pass(guided.guide, Raw(), alone)]
    return passes


def step_works(
    model: LanguageModel, num_streams: int, two_head: TwoHead | None, guide: LanguageModel | None
) -> dict[str, StepWork]:
    """What a decoding step of each mode must read and multiply, for one group of N streams."""
    n, ordinary, small = num_streams, _pass_work(model), _pass_work(guide) if guide else None
    works = {
        "raw": ordinary,
        "batch": StepWork(ordinary.weight_bytes, n * ordinary.products),
        "sequential": StepWork(n * ordinary.weight_bytes, n * ordinary.products),
    }
    if two_head is not None:
        own, body = list(two_head.parameters()), list(blocks(model.model).parameters())
        works["separate"] = _weights_work([*body, *own])
    if small is not None:
        weight_bytes = ordinary.weight_bytes + small.weight_bytes
        works["guided"] = StepWork(weight_bytes, ordinary.products + n * small.products)
        works["guide_batch"] = StepWork(small.weight_bytes, n * small.products)
    return works


def _pass_work(model: LanguageModel) -> StepWork:
    """One token through the blocks and the head; of the input table it reads one row."""
    return _weights_work([*blocks(model.model).parameters(), output_head(model.model).weight])


def _weights_work(weights: Sequence[torch.Tensor]) -> StepWork:
    return StepWork(
        sum(weight.numel() * weight.element_size() for weight in weights),
        sum(weight.numel() for weight in weights),
    )


def _two_head(model: LanguageModel, decoders: Sequence[Decoder], num_streams: int) -> TwoHead:
    trained = [decoder for decoder in decoders if isinstance(decoder, TwoHead)]
    if trained:
        return trained[-1]
    own = TwoHead(output_head(model.model), num_streams)
    return own.to(model.model.device, model.model.dtype).eval()


def _measure(
    modes: Mapping[str, Sequence[Pass]],
    settings: ThroughputSettings,
    progress: Progress,
    clock: Clock,
) -> list[ModeRuns]:
    """All repeats of all modes at one number of groups; then memory, which would disturb them."""
    found: dict[str, list[Decoded]] = {name: [] for name in modes}
    length = settings.generation_length
    rounds = range(-settings.warmup, settings.repeats)
    for repeat in progress(rounds, "throughput", len(rounds)):
        for name in rotated(list(modes), repeat):
            decoded = decode(modes[name], length, clock)
            if repeat >= 0:
                found[name].append(decoded)
    return [_runs_of(name, modes[name], found[name], length) for name in modes]


def rotated(names: Sequence[str], repeat: int) -> list[str]:
    """The order of the modes in a repeat: each repeat begins one further on."""
    first = repeat % len(names)
    return [*names[first:], *names[:first]]


def decode(passes: Sequence[Pass], length: int, clock: Clock) -> Decoded:
    """Continue all prompts by ``length`` greedy tokens, one pass after the other."""
    prefill = decoding = 0.0
    cache_bytes, made = 0, []
    with torch.inference_mode():
        for part in passes:
            device = part.model.model.device
            started = _now(clock, device)
            mixed_pass = MixedPass(part.model, part.decoder)
            chosen = [mixed_pass.start(part.prompts).argmax(dim=-1).T]  # (G, N)
            filled = _now(clock, device)
            for _ in range(length - 1):
                chosen.append(mixed_pass.step(chosen[-1]).argmax(dim=-1).T)
            ended = _now(clock, device)
            prefill, decoding = prefill + filled - started, decoding + ended - filled
            cache_bytes += mixed_pass.mixed.cache_bytes
            cache_bytes += mixed_pass.guide.cache_bytes if mixed_pass.guide is not None else 0
            made.append(torch.stack(chosen, dim=-1).tolist())
    return Decoded(prefill, decoding, cache_bytes, made)


def _now(clock: Clock, device: torch.device) -> float:
    """The time when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()


def _runs_of(
    name: str, passes: Sequence[Pass], decoded: Sequence[Decoded], length: int
) -> ModeRuns:
    streams = sum(len(group) for part in passes for group in part.prompts)
    device = passes[0].model.model.device
    return ModeRuns(
        mode=name,
        streams=streams,
        new_tokens=streams * length,
        steps=length - 1,
        prefill_seconds=tuple(run.prefill_seconds for run in decoded),
        decode_seconds=tuple(run.decode_seconds for run in decoded),
        peak_memory_bytes=peak_memory_bytes(
            lambda: decode(passes, length, time.perf_counter), device
        ),
        weight_bytes=_weight_bytes(passes[0]),
        cache_bytes_per_stream=decoded[-1].cache_bytes / streams,
    )


def _weight_bytes(part: Pass) -> int:
    """Of everything that a pass keeps in memory; tied weights are there once."""
    modules: list[object] = [part.model.model, part.decoder]
    modules += [part.decoder.guide.model] if part.decoder.guide is not None else []
    weights = [
        weight
        for module in modules
        if isinstance(module, torch.nn.Module)
        for weight in module.parameters()
    ]
    return _weights_work(weights).weight_bytes
