"""What a run needs in memory, measured on a few layers of its model.

A model is built with its first layers and a part of its vocabulary, in its types and bits. Rollouts, passes and
optimizer steps are run on it at small sizes, and the peaks that MLX reports are extrapolated: in the layers of each
kind, in the sequences of a pass, and in the tokens of a sequence where these are many. No number here is fitted to a
model or a machine. What is exact is counted: weights, adapters, optimizer state.

The head makes at most `head.CHUNK` logits at a time. So the vocabulary of a measured pass, of fewer sequences, is
cut by the same share.
"""

from __future__ import annotations

import gc
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from mlxrl.algo.algorithm import num_top
from mlxrl.errors import UserError, one_line
from mlxrl.policy.differentiate import leaves
from mlxrl.policy.head import CHUNK
from mlxrl.policy.lora import LoRA, adapt
from mlxrl.policy.modes import decoding
from mlxrl.policy.policy import Policy, as_policy
from mlxrl.policy.skeleton import Skeleton
from mlxrl.protocols import Algorithm
from mlxrl.rollout.batching_mode import SLOTTED, mode_of
from mlxrl.rollout.draw import key_of
from mlxrl.rollout.engine import Engine
from mlxrl.rollout.kv_cache import EqualLengthCache, PrefilledPrompt, SlotCache, capacity_for
from mlxrl.rollout.prefill import PREFILL_CHUNK, prefill
from mlxrl.rollout.sequence import Prompt, Request
from mlxrl.settings import Sampling
from mlxrl.tables import Config
from mlxrl.train.batch import SHARE_FROM, TOKENS_PER_PASS
from mlxrl.train.gradient import gradient
from mlxrl.train.teacher import Teacher
from mlxrl.train.update import complete, optimizer_step
from mlxrl.types import Batch, MicroBatch, Totals

Optimizer: TypeAlias = Callable[[], optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does. Tokens are those of the longest sequence.

    tasks, group: prompts, and sequences of each; rows: that decode together. prompt: its tokens; tokens: those after
    it, of which `sampled` are the model's; trained: those that an update reads; answer: those of an environment's
    answer. budget: tokens of a pass at most; recompute: as in `gradient`.
    """

    tasks: int
    group: int
    rows: int
    prompt: int
    tokens: int
    sampled: int
    trained: int
    answer: int
    budget: int
    recompute: bool

    @classmethod
    def of(cls, config: Config, prompt: int, context: int | None) -> Work:
        """What a step does: sequences are as long as all turns may be or the context, answers as a turn may be."""
        each, run, episode, train = config.sampling.max_tokens, config.rollout, config.environment, config.train
        capacity, answers = max(1, (context or sys.maxsize) - prompt), episode.max_turns - 1 if episode.factory else 0
        sampled = min(each * (1 + answers), episode.max_episode_tokens or sys.maxsize, capacity)
        tokens = min(sampled + each * answers, capacity)
        return cls(
            tasks=run.tasks_per_step, group=run.group_size, prompt=prompt, tokens=tokens, sampled=sampled,
            rows=min(run.max_rows, run.group_size * run.tasks_per_step), answer=each if answers else 0,
            trained=max(1, min(tokens, (train.max_tokens_per_sequence or sys.maxsize) - prompt)),
            budget=train.tokens_per_pass or TOKENS_PER_PASS, recompute=train.recompute,
        )  # fmt: skip

    def widest(self) -> tuple[int, int, int]:
        """Tokens of the shared prefix, sequences of a pass and their tokens, as `make_batch` lays out equal lengths."""
        prefix = self.prompt if self.prompt * (self.group - 1) >= SHARE_FROM else 0
        width = self.trained + self.prompt - prefix
        sequences = self.group if prefix else self.group * self.tasks
        return prefix, min(sequences, max(1, (self.budget - prefix) // width)), width


def constant(whole: Skeleton, lora: LoRA | None = None, optimizer: optim.Optimizer | None = None) -> dict[str, int]:
    """Bytes that are in memory all the time, by name. Adapters are put on the skeleton."""
    weights = _size(whole.model.parameters())
    if lora is None or optimizer is None:
        return {"weights": weights}
    adapt(whole.model, lora)
    optimizer.init(whole.model.trainable_parameters())
    adapters = _size(whole.model.trainable_parameters())
    return {"weights": weights, "adapters": adapters, "start": adapters, "optimizer": _size(optimizer.state)}


def _size(tree: Any) -> int:
    return sum(array.nbytes for _, array in leaves(tree))


def measured(
    whole: Skeleton, lora: LoRA | None, vocabulary: int, phase: Callable[[Policy], Sequence[float]]
) -> tuple[list[float], list[float]]:
    """What a phase measures of policies with some layers: extrapolated to all of them, and of the most."""
    total, found = np.zeros(1), np.zeros(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run gives them
        for layers, weight in whole.counts:
            try:
                found = np.array(phase(as_policy(whole.first_layers(layers, vocabulary), whole.tokenizer, lora=lora)))
            except Exception as error:  # a model's own code
                raise UserError(whole.id, f"{type(error).__name__}: {one_line(error, 200)}") from error
            total = total + weight * found
    return total.tolist(), found.tolist()


def peak_of(work: Callable[[], Any]) -> int:
    """Bytes that a piece of work needs beside what is in memory before it."""
    before = _settled()
    work()
    return max(mx.get_peak_memory() - before, 0)


def _settled() -> int:
    """Bytes in memory, once all that is not used is let go."""
    mx.synchronize()
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def extrapolated(
    value: Callable[[int, float], Any], count: int, item: int, prefix: int = 0, *, curved: bool = False
) -> np.ndarray:
    """What `value(n, share)` measures of n items after a prefix, at a share of their lengths, for `count` whole ones.

    It is linear in their number; of those that are long together few are measured, but with more tokens than the prefix
    has. In the lengths it is linear, or where `curved` a square through 0, as attention's scores are on platforms that
    make them.
    """
    most = 512 if mx.default_device() == mx.Device(mx.cpu) else 2048  # tokens that are measured in good time
    shares = (1.0,) if prefix + item <= most else (most / (prefix + item) / 2, most / (prefix + item))
    found: list[np.ndarray] = []
    for share in shares:
        many = max(2, int(most / (item * share)), 2 * -(-prefix // item))
        numbers = (count,) if count <= many else (many // 2, many)
        *low, high = (np.array(value(number, share)) for number in numbers)
        found.append(high + sum((high - one) * (count - many) / (many - many // 2) for one in low))
    if len(shares) == 1:
        return found[0]
    low, high = (one / share if curved else one for one, share in zip(found, shares, strict=True))
    growth = (high - low) / (shares[1] - shares[0])
    return high + (1 - shares[1]) * (np.maximum(growth, 0) if curved else growth)


def passes(
    whole: Skeleton, lora: LoRA | None, work: Work, algorithm: Algorithm, optimizer: Optimizer | None = None
) -> dict[str, float]:
    """Bytes of a step's passes, and of its optimizer step, by name; without optimizer, of passes without a gradient."""
    prefix, rows, width = work.widest()
    sampled = min(work.sampled, work.trained)
    number = 1 if rows >= work.group or not prefix else 2  # of passes; more are no more in memory
    several = work.tasks > 1 if prefix else rows < work.group * work.tasks
    vocabulary = max(16, min(whole.vocabulary, CHUNK // (rows * sampled)))

    def batch(rows: int, share: float) -> Batch:
        own = (int(-(-tokens * share // 1)) for tokens in (prefix, width, sampled))
        return random_batch(rows, *own, vocabulary=vocabulary, algorithm=algorithm, number=number)

    def phase(student: Policy) -> list[float]:
        teacher = Teacher(student, base=True) if "teacher" in algorithm.needs else None

        def scored(rows: int, share: float) -> int:
            own = batch(rows, share)
            return peak_of(lambda: complete(student, own, algorithm, frozenset({"old"})))

        def learned(rows: int, share: float) -> int:
            own = complete(student, batch(rows, share), algorithm, algorithm.needs - {"old"}, teacher)
            return peak_of(lambda: gradient(student, own, algorithm, teacher, recompute=work.recompute))

        if optimizer is None:
            return [float(extrapolated(scored, rows, width, prefix, curved=True)), 0.0]
        rule, least = optimizer(), random_batch(1, 0, 2, 1, vocabulary=vocabulary, algorithm=algorithm)
        steps = [peak_of(lambda: optimizer_step(student, rule, least, algorithm, teacher, 1.0, False)) for _ in "12"]
        gradients = several * _size(student.model.trainable_parameters())  # of other passes, summed
        return [float(extrapolated(learned, rows, width, prefix, curved=True)) + gradients, steps[1]]

    return dict(zip(("passes", "optimizer step"), measured(whole, lora, vocabulary, phase)[0], strict=True))


def random_batch(
    rows: int, prefix: int, tokens: int, sampled: int, *, vocabulary: int, algorithm: Algorithm, number: int = 1
) -> Batch:
    """So many equal passes of sequences of random ids that share a prefix; the model sampled the last ids."""
    draw, mask = np.random.default_rng(0), np.zeros((rows, tokens), np.float32)
    mask[:, tokens - sampled :] = 1

    def ids(*shape: int) -> mx.array:
        return mx.array(draw.integers(0, vocabulary, size=shape), mx.int32)

    one = MicroBatch(
        prefix=ids(prefix), tokens=ids(rows, tokens), mask=mx.array(mask), advantages=mx.array(mask),
        sampler_logprobs=mx.zeros(mask.shape), trajectories=tuple(range(rows)), prefix_id=0 if prefix else None,
        top_ids=ids(rows, tokens, kept) if (kept := num_top(algorithm)) else None,
        observation_mask=mx.array(1 - mask) if "observations" in algorithm.needs else None,
    )  # fmt: skip
    return Batch((one,) * number, Totals(mask.size, rows, 1, sampled, 0, mask.size), (), {}, {})


def rollout(whole: Skeleton, lora: LoRA, work: Work, sampling: Sampling, algorithm: Algorithm) -> dict[str, float]:
    """Bytes of a rollout by what is run: first prompts, decode steps, answers, later prompts beside full caches."""
    full, together = capacity_for(work.prompt + work.tokens + 1), max(1, PREFILL_CHUNK // work.prompt)
    first, later = -(-work.rows // work.group), max(0, work.tasks - work.rows // work.group)
    few, chunk = min(together, max(2, 256 // work.prompt)), min(work.prompt, PREFILL_CHUNK)
    top = max(sampling.num_top, num_top(algorithm))
    draws = replace(sampling, max_tokens=min(5, work.tokens), min_tokens=0, stop_strings=(), num_top=top)

    def prompts(count: int, length: float) -> list[Prompt]:
        size = (count, max(1, round(length)))
        return list(map(tuple, np.random.default_rng(0).integers(0, whole.vocabulary, size).tolist()))

    def phase(policy: Policy) -> list[float]:
        def prefilling(_: int, share: float) -> list[int]:
            return _prefilled(policy, prompts(few, chunk * share), work.rows)

        def decoded(_: int, share: float) -> list[int]:  # from where the caches grow for the last time
            capacity, answer = capacity_for(round(full * share)), math.ceil(work.answer * share)
            before = max((length for length in range(capacity) if capacity_for(length) < capacity), default=0)
            start = min(before - 4, capacity - 12 - 2 * answer)
            fed = max(64, round(PREFILL_CHUNK * share))
            return _decoded(policy, prompts(1, start)[0], work.rows, draws, answer, fed)

        start, rest = extrapolated(prefilling, 1, chunk, curved=True), extrapolated(decoded, 1, full)
        return [*start.tolist(), *rest.tolist()]

    found, (*_, in_flight, _, _, _) = measured(whole, lora, whole.vocabulary, phase)
    run, kept, slots, _, full_slots, decoding, answers = found
    run += kept * (work.prompt / chunk - 1)  # of the chunks of a prompt before the last
    kept, slots, in_flight = (size * work.prompt / chunk for size in (kept, slots, in_flight))

    def joined(count: int, slots: float, beside: float, in_flight: float) -> float:
        """While prompts run, and while sequences get caches: MLX is ahead as far, however many the layers."""
        return max(beside + run / few * count, slots + kept / few * count + in_flight)

    begin = joined(min(first, together), slots, slots if first > together else 0.0, in_flight)
    late = joined(min(later, first, together), full_slots, full_slots, in_flight * full_slots / slots) if later else 0.0
    return {"first prompts": begin, "decoding": decoding, "answers": answers, "later prompts": late}


def _prefilled(policy: Policy, prompts: Sequence[Prompt], rows: int) -> list[int]:
    """The peak of prompts, what their caches hold, what those of sequences hold, what is in flight as these fill."""
    mode, prefilled, peaks, kept = mode_of(policy), list[PrefilledPrompt](), list[int](), 0
    with decoding(policy) as merged:
        for _ in range(2):  # the least of which is extrapolated: how far MLX is ahead differs
            prefilled.clear()
            before = _settled()
            prefilled += prefill(merged, prompts, PREFILL_CHUNK)
            mx.synchronize()
            peaks.append(mx.get_peak_memory() - before)
            kept = mx.get_active_memory() - before
        before = _settled()
        caches = SlotCache(rows) if mode in SLOTTED else EqualLengthCache(rows)
        caches.fit(len(prompts[0]) + 2)
        for number, prompt in enumerate(prefilled[: min(2, rows)]):
            caches.place(range(number, rows, 2), prompt)
        mx.synchronize()
        resident = mx.get_active_memory()
    return [min(peaks), kept, resident - before, mx.get_peak_memory() - resident]


def _decoded(policy: Policy, prompt: Prompt, rows: int, sampling: Sampling, answer: int, chunk: int) -> list[int]:
    """What caches hold in which sequences have decoded, the peak of that, without its first steps, in which they get
    their caches, and the peak while as many as fill a chunk read an answer of so many tokens and go on."""
    before = _settled()

    def steps(engine: Engine) -> list[int]:
        peaks = list[int]()
        while engine.busy:
            engine.step()
            peaks.append(mx.get_peak_memory() - before)
            mx.reset_peak_memory()
        mx.synchronize()
        return [*peaks, mx.get_peak_memory() - before]

    with decoding(policy) as merged, Engine(merged, max_rows=rows, prefill_chunk=chunk) as engine:
        wanted = [Request(prompt, key_of(0, row), sampling, stop_ids=(), keep=answer > 0) for row in range(rows)]
        sequences = [engine.submit(request) for request in wanted]
        peak, resident = max([0, *steps(engine)[2:]]), mx.get_active_memory() - before
        for sequence in sequences[: max(1, chunk // answer)] if answer else ():
            engine.extend(sequence, [1] * answer)
        return [resident, peak, max([0, *steps(engine)])]
