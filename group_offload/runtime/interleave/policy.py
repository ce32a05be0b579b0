"""Forwards that share passes: which may, which go together, and which call of a step is run beside the first.

[Note: Forwards that share a pass]
Forwards share a pass if they keep the contract: see `contract`. It is signed by whoever lists a class or passes
`interleave_forwards=True`, and what can be seen of it at little cost is looked at. Random states, versions of tensors and the
tables of modules are, around forwards. And the first calls of a new kind that have company are tried: each is made alone, with
a look at the modules at each gate, and then all together; the bits have to be the same. A kind is what calls have in common
that take the same way: see `Arguments.key`. In an interleaved pass all come to a group before one goes on to the next. So state
that one leaves in the modules for the length of its forward is met by the others in the trial as in any later pass.

Company are forwards of other threads, and the other calls of a step of guidance. A step is a row of calls with the same first
tensor (the latents). If the last step had several, the first call of the next one predicts the arguments of the others: what
was the same in both calls comes from this call, the rest has to be what it was. Where the calls of a step are announced, that
tells their arguments, and no step has to be seen before: see `guidance_steps`. They run beside it, in threads of their own.
The first call returns once the pass is over. If the caller then calls with the very arguments, and neither weights nor modules
were changed meanwhile, it gets the result that is there. Else the results are thrown away. After two steps in a row with such a
miss, the calls of steps of that kind are not predicted again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ...base.compiled import HANDLE
from ...base.pagemap import scans_quickly
from ...base.recent import Recent
from ...base.tensors import tensors_in
from ...base.torch_internals import has_global_hooks, set_eval_frame
from ..budget.need import InputSignature
from .arguments import Arguments, are_equal, is_plain
from .caller import Caller
from .fingerprint import Fingerprint, examine
from .guidance_steps import MOST_CALLS, Steps
from .passes import Broken, InterleavedPasses
from .speculation import RandomStates, Speculation, others_may_draw
from .turn_lock import Participant, is_on_its_way

logger = logging.getLogger("group_offload")

_MOST_KINDS = 256
"""The number of kinds of calls that are remembered."""
_MOST_FINDINGS = 3
"""How often a kind of calls may be found to break the contract before it goes alone for good. A first forward may move a table
to the device, and another thread may draw random numbers meanwhile."""
_MIN_GAIN = 0.05
"""With "auto" forwards share a pass if that is to save this part of their time: a first one takes a trial."""
_SAME_MEMORY = "it returns the same memory each time"
_MOST_IN_VAIN = 4
"""How many trials there are with no shared pass between them: each call may be of another kind, or find other modules."""


class InterleavePolicy:
    """Lets forwards of one module share passes. Thread-safe."""

    def __init__(self, passes: InterleavedPasses, *, asks_plan: bool) -> None:
        self._passes, self._turns, self._backend = passes, passes.turns, passes.backend
        self._asks_plan = asks_plan
        """Whether forwards only share a pass where the plan says that this saves time."""
        self._steps = Steps()
        self._known: Recent[Hashable, int] = Recent(_MOST_KINDS)
        """For each kind of calls, the epoch in which they were right together. Less than 0: how often in a row one was found to
        break the contract, many times if that is sure."""
        self._gain: float | None = None
        """The share of time that a shared pass saves by the plan; None if that isn't known yet."""
        self._num_in_vain = 0
        """The trials since forwards last shared a pass."""
        self._state: Fingerprint | None = None
        """What the last call found."""
        self._epoch = 0
        """How often the last call has found another state than the one before."""
        self._said: Recent[str, None] = Recent()
        self.alone: Callable[..., Any] = lambda *args, **kwargs: None
        """A call of the module that shares a pass only if its thread is a participant's."""

    def renew(self, alone: Callable[..., Any]) -> None:
        """The module was partitioned again: what was found of its forwards says nothing of those to come."""
        self.alone, self._num_in_vain = alone, 0
        self._known.clear()

    def close(self) -> None:
        """Throw all results away that nobody called for."""
        self._steps, self._state = Steps(), None  # a call in progress goes on with what it has

    # ---------------------------------------------------------------- a call

    def call(self, args: Any, kwargs: Any, why_not: str | None) -> Any:
        """Call the module: alone, or in a pass that other forwards share, unless there is a reason why not."""
        if is_on_its_way() or self._turns._is_owned() or self._backend.is_capturing():
            return self.alone(*args, **kwargs)  # inside of another call, or refused
        try:
            return self._called(args, kwargs, why_not or _state_of_thread())
        finally:  # an interrupt may have come as it left, or as it took the lock
            self._passes.leave()

    def _called(self, args: Any, kwargs: Any, reason: str | None) -> Any:
        steps, now = self._steps, Arguments(args, kwargs)
        if self._passes.lock is not self._turns:
            reason = "it shares weights with another offloaded model"
        if now.other is not None:
            reason = f"an input has a {type(now.other).__name__} in it, which can't be compared between calls"
        if reason is not None:
            self._say(reason)
            self._discard(steps)
            steps.forget()
            return self.alone(*args, **kwargs)
        if steps.ahead:
            found = steps.ahead[0]
            # The arguments come last: the host may wait for the device there.
            if found.error is None and self._is_as_then(*steps.found_in) and now.are_same(found.arguments):
                steps.hit()
                return found.output
            self._discard(steps)
        predicted = [] if steps.goes_on_with(now) else steps.begin(now, args, kwargs)
        if predicted and self._backend.has_streams and not (scans_quickly() and self._passes.detects_edits):
            self._say("edits of weights between two calls of a step can't be detected quickly here")
            predicted = []
        if not now.are_counted:
            self._say("its inputs are inference tensors: call it under torch.no_grad()")
            steps.forget()
            predicted = []
        elif len(steps.calls) <= MOST_CALLS:  # of a step with more calls none is predicted
            steps.calls.append(now)
        return self._made([now, *predicted], steps, args, kwargs)

    def _made(self, calls: list[Arguments], steps: Steps, args: Any, kwargs: Any) -> Any:
        """Make the first of these calls, and run the others beside it if that is known to be right."""
        room, num_callers = self._turns.most, self._turns.announce()
        if max(len(calls), num_callers) == 1:
            return self.alone(*args, **kwargs)
        if len(calls) > room and self._passes.counters.passes:
            reason = f"the device has space for {room} at once, not for {len(calls)}"
            if self._passes.placer.sends_nothing:
                reason = "by its plan, forwards transfer no weights"
            self._say(reason)
        calls = calls[:room]
        if room == 1 or not self._pays(calls, min(num_callers, room)) or not self._look():
            return self.alone(*args, **kwargs)
        may_share = [self._judgement(call.key) for call in calls]
        if False in may_share:
            del calls[1:], may_share[1:]
        if all(may_share):
            return self._run_interleaved(steps, calls, args, kwargs)
        if may_share[0] is not False and max(len(calls), num_callers) > 1:
            if self._num_in_vain < _MOST_IN_VAIN:
                return self._trial(steps, calls, args, kwargs)
            self._say("its inputs or modules differ from step to step")
        return self.alone(*args, **kwargs)

    def _pays(self, calls: list[Arguments], num_callers: int) -> bool:
        """Whether these calls, or those of so many threads, are faster in one pass by the plan. True if nobody asks it."""
        if not self._asks_plan:
            return True
        top, num_each = weakref.ref(self._passes.root), num_callers if len(calls) == 1 else 1
        kinds = [InputSignature(top, call.shapes, False) for call in calls] * num_each

        def weigh() -> None:
            self._gain = self._passes.placer.gain_from_interleaving(kinds)

        self._passes.if_at_rest(weigh)  # while another thread has the lock, the last answer has to do
        gain = self._gain
        if gain is not None and gain < _MIN_GAIN:
            self._say(f"by its plan, sharing saves less than {_MIN_GAIN:.0%}")
        return gain is not None and gain >= _MIN_GAIN

    def _look(self) -> bool:
        """Look at the modules. Returns whether forwards may share passes with them as they are."""
        if self._state is not None and self._state.holds():
            return True
        found = examine(self._passes.root)
        self._epoch += 1
        self._state = None if isinstance(found, str) else found
        if isinstance(found, str):
            self._say(found)
        return self._state is not None

    def _is_as_then(self, epoch: int, edits: int, caller: Caller) -> bool:
        """Whether neither weights, modules nor the state of the thread were changed since."""
        with self._turns:
            if self._passes.is_removed or self._passes.were_touched():
                return False
            self._passes.root.__dict__[HANDLE].refresh()  # it commits edits that the system tells of
        return (
            self._look()
            and epoch == self._epoch
            and edits == self._passes.edits()
            and caller.is_like(Caller(self._backend))
        )

    def _discard(self, steps: Steps) -> None:
        """Throw away what was not called for."""
        if steps.ahead:
            self._passes.counters.discarded += len(steps.ahead)
            if steps.miss():
                self._say("the calls of a step were predicted wrongly twice in a row")

    # ---------------------------------------------------------------- together

    def _trial(self, steps: Steps, calls: list[Arguments], args: Any, kwargs: Any) -> Any:
        """Make these calls one after another, and once more together. If the bits are the same, such calls share passes."""
        self._num_in_vain += 1
        output, finding = self._looked_at(calls[0], args, kwargs)
        before, outputs = RandomStates(self._backend.device), [tensors_in(output)]
        with suppress(Exception):  # it is raised again where the call is made
            for call in calls[1:]:
                given = call.given() if finding is None else None
                if given is None:
                    break
                found, finding = self._looked_at(call, *given)
                outputs.append(tensors_in(found))
        keys = [call.key for call in calls]
        if _overlap(outputs, (args, kwargs)):
            self._note(keys, _SAME_MEMORY)
            return self.alone(*args, **kwargs)
        if finding is None and len(outputs) == len(calls):
            return self._run_interleaved(steps, calls, args, kwargs, output, outputs)
        self._put_back(keys, len(keys), before)
        if finding is not None:
            self._note(keys, finding, 1)
        return output

    def _run_interleaved(
        self, steps: Steps, calls: list[Arguments], args: Any, kwargs: Any, made: Any = None, expected: Any = None
    ) -> Any:
        """Make a call in a pass that others may share, and run the calls that are predicted beside it.

        Args:
            made: In a trial, what the call has returned by itself.
            expected: The tensors that each of the calls has returned by itself.
        """
        is_trial = expected is not None
        boarded: list[Participant] = []
        ahead: list[Speculation] = []
        keys, epoch, caller = [call.key for call in calls], self._epoch, Caller(self._backend)
        before, changed = RandomStates(self._backend.device), self._passes.counters.changed
        known = {key: self._known.get(key, 0) for key in keys}
        output, finding = None, None
        try:
            output = self._run(caller, calls, boarded, ahead, args, kwargs, needs_company=is_trial)
            size = boarded[0].interleaved.size
            is_void = self._put_back(keys, size, before)
        except Exception as error:
            size = boarded[0].interleaved.size if boarded else 1
            # What the others have drawn was put back, and so was what this one has: it is made again.
            is_void, is_short = self._put_back(keys, size, before), isinstance(error, torch.OutOfMemoryError)
            if not (is_trial or is_void or (size > 1 and (is_short or isinstance(error, Broken)))):
                raise
            if is_short:
                self._say(f"the device is out of memory with {size} at once")
                self._passes.least_too_many = min(self._passes.least_too_many, size)
            elif is_trial:
                self._say(f"a trial failed: {type(error).__name__}: {error}")
            is_void = True
        if is_trial and (size == 1 or is_void or any(each.error is not None for each in ahead)):
            return made
        if self._passes.counters.changed != changed:
            finding = "it changes its weights or buffers"
        elif not calls[0].are_unchanged(args, kwargs):
            finding = "it changes its inputs"
        elif is_trial:
            shared = [tensors_in(output), *(tensors_in(each.output) for each in ahead)]
            if _overlap([*expected, *shared], (args, kwargs)):
                finding, is_void = _SAME_MEMORY, True
            elif not (any(expected) and all(map(are_equal, shared, expected))):
                finding = "outputs differ from those of separate forwards, or can't be compared"
        if finding is not None:
            self._note(keys, finding)
        if is_trial and finding is not None:
            return self.alone(*args, **kwargs) if is_void else made
        self._passes.counters.predicted += len(ahead)
        if is_void or finding is not None:
            self._passes.counters.discarded += len(ahead)
            return self.alone(*args, **kwargs) if is_void else output
        for key, judgement in known.items():
            if self._known.get(key, 0) >= judgement:  # else another forward of the pass was found to break the contract
                self._known[key] = epoch
        if not is_trial:
            self._num_in_vain = 0
        steps.ahead, steps.found_in = ahead, (epoch, self._passes.edits(), caller)
        if size > 1:
            self._say("each block is loaded once for all of them", "together")
        return output

    def _run(
        self,
        caller: Caller,
        calls: Sequence[Arguments],
        boarded: list[Participant],
        ahead: list[Speculation],
        args: Any,
        kwargs: Any,
        *,
        needs_company: bool = False,
    ) -> Any:
        """Make this thread's forward beside those of others. It returns once they are over that were begun here.

        Args:
            calls: This thread's call, and those that other threads make in its place.
            boarded: List that gets the participants, before Ctrl-C can come in between.
            ahead: List that gets the forwards of the other threads.
            needs_company: Whether to do nothing, and return None, if nobody else shares the pass.
        """
        output = None
        try:
            self._turns.board([call.shapes for call in calls], boarded)
            interleaved = boarded[0].interleaved
            if interleaved.size > 1 or not needs_company:
                for participant, call in zip(boarded[1:], calls[1:], strict=True):
                    ahead.append(Speculation(self._passes, self.alone, caller, participant, call))
                    ahead[-1].start()
                output = self.alone(*args, **kwargs)
        except BaseException as error:
            for participant in boarded[1:]:
                self._turns.leave(participant)
            if not isinstance(error, Exception):
                ahead.clear()  # Ctrl-C waits for nobody
            raise
        finally:
            self._passes.leave()
            for each in ahead:
                each.join()
        return output

    def _looked_at(self, call: Arguments, args: Any, kwargs: Any) -> tuple[Any, str | None]:
        """Make a call alone. What it returns, and how it breaks the contract, if that is seen."""
        changes: list[bool] = []
        with self._turns:
            state, before, changed = self._state, RandomStates(self._backend.device), self._passes.counters.changed

            def look() -> None:
                if not (changes or (state is not None and state.holds())):
                    changes.append(True)

            self._passes.at_gate = look
            try:
                output = self.alone(*args, **kwargs)
            finally:
                self._passes.at_gate = None
            look()
            finding = None
            if changes:
                finding = "it changes attributes of its modules"
            elif before != RandomStates(self._backend.device):
                finding = "it draws random numbers"  # or in another thread meanwhile
            elif self._passes.counters.changed != changed:
                finding = "it changes its weights or buffers"
        if finding is None and not call.are_unchanged(args, kwargs):
            finding = "it changes its inputs"
        return output, finding

    def _put_back(self, keys: list[Hashable], size: int, before: RandomStates) -> bool:
        """Let the generators go on from `before` if random numbers were drawn by these calls, and by nobody else.

        Returns whether they do. `size` forwards shared the pass.
        """
        if size < 2 or before == RandomStates(self._backend.device):
            return False
        finding = "it draws random numbers"
        if size != len(keys) or others_may_draw():
            self._note(keys, finding, 1)
            return False
        self._note(keys, finding)
        before.restore()
        return True

    def _judgement(self, key: Hashable) -> bool | None:
        """Whether calls of a kind share passes; None if they were not tried with the modules as they are."""
        known = self._known.get(key, 0)
        return False if known <= -_MOST_FINDINGS else known == self._epoch or None

    def _note(self, keys: list[Hashable], finding: str, times: int = _MOST_FINDINGS) -> None:
        """Note that calls of these kinds break the contract. They go alone after a few times in a row, or from now on."""
        for key in {*keys}:
            self._known[key] = min(self._known.get(key, 0), 0) - times
        if any(self._known.get(key, 0) <= -_MOST_FINDINGS for key in keys):
            self._say(finding)

    def _say(self, reason: str, how: str = "separately") -> None:
        if reason not in self._said:
            self._said[reason] = None
            logger.info("Running forwards of %s %s (interleave_forwards): %s.", self._passes.name, how, reason)


def _overlap(outputs: Sequence[Any], given: Any) -> bool:
    """Whether outputs of different calls lie in the same memory, which is not that of inputs. Such calls go alone."""
    inputs, *memory = (
        {each.untyped_storage().data_ptr() for each in tensors if is_plain(each)}
        for tensors in (tensors_in(given), *outputs)
    )
    return len(set().union(*memory) - inputs) < sum(len(each - inputs) for each in memory)


def _state_of_thread() -> str | None:
    if torch.is_grad_enabled():
        return "gradients are enabled: call it under torch.no_grad()"
    if has_global_hooks():
        return "a global module hook is registered"
    compiler = set_eval_frame(None)
    set_eval_frame(compiler)
    return "it is compiled as a whole: compile its blocks instead" if compiler else None
