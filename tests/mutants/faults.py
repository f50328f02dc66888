"""Faults by hand, which are easily made and seldom seen. Each has tests of which one must notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BACKEND = "tests/engine/test_batch.py"
CONSTRAINTS = "tests/engine/test_constraints.py"
DRAFT_MODEL = "tests/engine/test_draft_model.py"
DRAFTS = "tests/engine/test_drafts_in_batch.py"
FUZZ = "tests/engine/test_engine_fuzz.py"
CHECKPOINTS = "tests/engine/test_checkpoints.py"
MEMORY = "tests/engine/test_memory_limit.py"
ROWS = "tests/engine/test_rows.py"
PREFIXES = "tests/engine/test_prefixes.py"
PREEMPTION = "tests/pure/test_preemption.py"
RANKS = "tests/pure/test_distributed.py"
SAMPLING = "tests/engine/test_sampling.py"
SCHEDULER = "tests/pure/test_scheduler.py"


@dataclass(frozen=True, slots=True)
class Fault:
    """In the one module that has the text ``was``, it is ``becomes``. One of ``tests`` must fail."""

    name: str
    was: str
    becomes: str
    tests: tuple[str, ...]


def faulty(fault: Fault, root: Path) -> tuple[str, str]:
    """The path of the fault's module, and its text with the fault. Raises LookupError when no or several have it."""
    texts = {path.relative_to(root).as_posix(): path.read_text() for path in (root / "mlx_serve").rglob("*.py")}
    found = [(path, text) for path, text in texts.items() for _ in range(text.count(fault.was))]
    if len(found) != 1:
        raise LookupError(f"{len(found)} places have the text of the fault '{fault.name}'")
    [(path, text)] = found
    return path, text.replace(fault.was, fault.becomes)


FAULTS = (
    Fault(
        "a decoding job's cache is kept under one token less",
        "if self.row is None else as_ids(self.row.tokens)",
        "if self.row is None else as_ids(self.row.tokens[:-1])",
        (PREFIXES,),
    ),
    Fault(
        "the last row is lost when another one leaves",
        "_write(array, self._shape, row, moved)",
        "_write(array, self._shape, last, moved)",
        (ROWS,),
    ),
    Fault(
        "arrays that shrink to their rows stay views of the old ones",
        "if (n_used, n) == (shape[0], shape[2]):",
        "if False:",
        (ROWS,),
    ),
    Fault(
        "free rows are not given up when memory is short",
        "trims = self.spare_bytes > max_spare",
        "trims = False",
        (ROWS,),
    ),
    Fault(
        "a dropped token of a window's row hides an older one",
        "self.ring = None if self.window is None else self.window + MAX_PASS",
        "self.ring = self.window",
        (ROWS,),
    ),
    Fault(
        "a claimed prefix is counted beside its job",
        "            self._uncount(entry)\n            self._pins = {other",
        "            self._pins = {other",
        (PREFIXES,),
    ),
    Fault(
        "a prefix is taken over from a conversation that goes on elsewhere",
        "if n_common < self.n_prompt - _OPENING:",
        "if False:",
        (PREFIXES,),
    ),
    Fault(
        "a seed draws the same number at every token",
        "self.position = self._output(context).shape[0]",
        "pass",
        (BACKEND,),
    ),
    Fault(
        "a seed's coin is its draw",
        "return coin_key, draw_key",
        "return draw_key, draw_key",
        (SAMPLING,),
    ),
    Fault(
        "all unseeded rows draw one number",
        "return mx.random.categorical(logprobs * (1 / self._temperature), key=draw_key)",
        "return mx.argmax(logprobs * (1 / self._temperature) + mx.random.gumbel((logprobs.shape[-1],)), axis=-1)",
        (SAMPLING,),
    ),
    Fault(
        "XTC tosses one coin for all rows",
        "coin = mx.random.uniform(shape=(logprobs.shape[0], 1), key=key)",
        "coin = mx.random.uniform(shape=(1, 1), key=key)",
        (SAMPLING,),
    ),
    Fault(
        "the draft model keeps a proposal that was wrong",
        "surplus.append(n_fed - min(n_right, n_fed, len(came) - 1))",
        "surplus.append(0)",
        (DRAFT_MODEL,),
    ),
    Fault(
        "the draft model never gets the tokens of passes without drafts",
        "fed = [[*tokens, token] for tokens, token in zip(self._unseen(rows), drawn, strict=True)]",
        "fed = [[token] for token in drawn]",
        (DRAFT_MODEL,),
    ),
    Fault(
        "a sequence leaves without what the draft model has not seen",
        "self._model(mx.array([unseen]), cache=cache)",
        "pass",
        (DRAFT_MODEL,),
    ),
    Fault(
        "how often the draft model would be right is never found out without drafts",
        "if self._n_caught_up % _COMPARED:",
        "if True:",
        (DRAFT_MODEL,),
    ),
    Fault(
        "the tokens of a pass are read before the next one is started",
        "fed = self._drawn\n",
        "fed = self._drawn\n        fed.tolist()\n",
        (ROWS,),
    ),
    Fault(
        "tokens are drawn from logits that are no log-probabilities",
        "if sampler is not greedy_sampler:",
        "if False:",
        (BACKEND,),
    ),
    Fault(
        "the log-probabilities behind a wrong draft stay",
        "self.logprobs.take_back(n_drawn - 1 - len(right))",
        "pass",
        (DRAFTS,),
    ),
    Fault(
        "penalties do not count the drafted tokens",
        "self.context.update_and_fetch(mx.array(list(right)))",
        "pass",
        (DRAFTS,),
    ),
    Fault(
        "penalties within a draft do not count it",
        "mx.concatenate([context, fed[j, 1 : 1 + i]])",
        "context",
        (DRAFTS,),
    ),
    Fault(
        "rows are not charged the drafts of their last pass",
        "min(last + MAX_PASS, ",
        "min(last, ",
        (MEMORY,),
    ),
    Fault(
        "penalties forget the prompt in a batch",
        "row.context = TokenBuffer(row.tokens)",
        "row.context = TokenBuffer()",
        (PREFIXES,),
    ),
    Fault(
        "a gate's exits are lost while reasoning",
        'if token in self._gate.exits:\n            self._place = "outside"\n        elif tuple(',
        "if tuple(",
        (CONSTRAINTS,),
    ),
    Fault(
        "a gate's exits are masked while reasoning",
        "mask = self._all_but_ends(width)\n        mask[_below(self._gate.exits, width)] = True",
        "mask = self._all_but_ends(width)",
        (CONSTRAINTS,),
    ),
    Fault(
        "a batch is charged its sum",
        "n_bytes = rows_bytes(self._row_bytes, in_batch)",
        "n_bytes = sum(self._row_bytes(n) for _, n in in_batch)",
        (BACKEND,),
    ),
    Fault(
        "prefixes do not yield at admission",
        'self._room.make_room()\n        return "in"',
        'return "in"',
        (SCHEDULER,),
    ),
    Fault(
        "the oldest job is paused",
        "max(reversed(running), key=rank)",
        "min(running, key=rank)",
        (PREEMPTION,),
    ),
    Fault(
        "of jobs that came together the first is paused",
        "max(reversed(running), key=rank)",
        "max(running, key=rank)",
        (PREEMPTION,),
    ),
    Fault(
        "a job without a place in memory holds back paused ones",
        "(is_blocked and not is_paused)",
        "is_blocked",
        (PREEMPTION,),
    ),
    Fault(
        "a failed step forgets the paused jobs",
        "self._fail([*slot.running, *slot.paused], error)",
        "self._fail(slot.running, error)",
        (PREEMPTION,),
    ),
    Fault(
        "a paused job begins with its prompt again",
        "ids = as_ids([*sequence.held, token])",
        "pass",
        ("tests/engine/test_pause.py",),
    ),
    Fault(
        "prefixes stay after a failed step",
        "            slot.backend.shrink_cache(0)\n",
        "",
        (SCHEDULER,),
    ),
    Fault(
        "prefixes are kept unevaluated",
        "mx.eval([layer.state for layer in cache])\n        if not is_whole(",
        "if not is_whole(",
        (PREFIXES,),
    ),
    Fault(
        "the wrong model's prefixes are given up first",
        "product((False, True), self._loaded.slots.values())",
        "product((False, True), reversed(self._loaded.slots.values()))",
        (SCHEDULER,),
    ),
    Fault(
        "the prefixes of the jobs in line are not pinned",
        "slot.backend.pin([job for job in waiting if job.model == name])",
        "slot.backend.pin([])",
        (PREFIXES,),
    ),
    Fault(
        "the model that is used is not the most recently used one",
        "self._slots[job.model] = self._slots.pop(job.model)",
        "pass",
        (SCHEDULER,),
    ),
    Fault(
        "a cancelled scoring job runs on",
        "self._scoring = [scoring for scoring in self._scoring if scoring.choice.job not in jobs]\n",
        "\n",
        (PREFIXES,),
    ),
    Fault(
        "a cancelled embedding job runs on",
        "self._embedding = deque(embedding for embedding in self._embedding if embedding.job not in jobs)\n",
        "\n",
        ("tests/engine/test_embedding.py",),
    ),
    Fault(
        "the leader never forgets the numbers of jobs that end",
        "if is_last(event):\n                self._numbers.pop(job, None)",
        "pass",
        (RANKS,),
    ),
    Fault(
        "the leader never forgets the numbers of cancelled jobs",
        "for job in jobs:\n            self._numbers.pop(job, None)",
        "",
        (RANKS,),
    ),
    Fault(
        "the follower never forgets the numbers of jobs that end",
        "if is_last(event):\n                self._forget(job)",
        "pass",
        (RANKS,),
    ),
    Fault(
        "the follower never forgets the numbers of cancelled jobs",
        "for job in jobs:\n            self._forget(job)",
        "",
        (RANKS,),
    ),
    Fault(
        "a shared cache is longer than what is shared",
        "shared = cut(donor.cache, donor.n_done, checkpoints, prompt.n_done)",
        "shared = cut(donor.cache, donor.n_done, (), donor.n_done)\n            return shared",
        (PREFIXES, FUZZ),
    ),
    Fault(
        "a checkpoint's state is the state where the sequence ends",
        "states = copy.deepcopy(list(checkpoint.layers))",
        "states = [layer for layer in leaves(cache) if not is_complete(layer)]",
        (CHECKPOINTS,),
    ),
    Fault(
        "a sequence's checkpoints are not kept with it",
        "checkpoints=self.trail.kept",
        "checkpoints=()",
        ("tests/engine/test_checkpoint_reuse.py",),
    ),
    Fault(
        "checkpoints count no bytes",
        " + sum(one.n_bytes for one in self.checkpoints)",
        "",
        ("tests/engine/test_checkpoint_reuse.py",),
    ),
)
