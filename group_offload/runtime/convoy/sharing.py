"""Forwards that share passes: which may, who travels with whom, and which call of a step is run beside the first.

[Note: Forwards that share a pass]
A forward may share a pass if it is a function of its inputs and the weights. So a call of a new kind is made alone first, and
watched: random numbers, attributes of modules, buffers and inputs have to stay as they are. The next such call that has company
is made alone once more, and then all of them together: the bits have to be the same. Only then forwards of that kind share
passes. A kind is what calls have in common that take the same way: see `Arguments.key`.

Company are forwards of other threads, and the other calls of a step of guidance. A step is a row of calls with the same first
tensor (the latents). If the last step had several, the first call of the next one foresees the arguments of the others: what
was the same in both calls comes from this call, the rest has to be what it was. Where the calls of a step are announced, that
tells their arguments, and no step has to be seen before: see `announced`. They run beside it, in threads of their own.
The first call returns once the pass is over. If the caller then calls with the very arguments, and neither weights nor modules
were changed meanwhile, it gets the result that is there. Else the results are thrown away. After two misses in a row the call
of the last miss is not foreseen again, and neither are those after it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import nn

from ...base.device import Backend
from ...base.pagemap import Detection, detection
from ...base.recent import Recent
from ...base.torch_internals import has_global_hooks, set_eval_frame
from ...base.tuning import tuning
from ...base.weak import Weak
from .ahead import Ahead, in_company, is_in_company
from .arguments import Arguments, are_equal, is_plain
from .caller import Caller
from .contents import RandomStates, others_may_draw
from .helpers import Helpers
from .lock import Traveller
from .passes import Broken, SharedPasses
from .steps import MOST_CALLS, Output, Steps, tensors_of
from .watch import Survey, Watch, survey

logger = logging.getLogger("group_offload")

_MOST_KINDS = 256
"""The number of kinds of calls that are remembered."""
_MOST_FINDINGS = 3
"""How often a kind of calls is watched before it goes alone for good. A first forward may move a table to the device, and
another thread may draw random numbers meanwhile."""


class Verdict(Enum):
    """What is known of a kind of calls."""

    WATCHED = "watched"
    """A call was watched, and changed nothing."""
    SHARED = "shared"
    """Calls that shared a pass had the bits of calls made one after another."""
    APART = "apart"
    """They do not share passes."""


class Sharing:
    """Lets forwards of one module share passes. Thread-safe."""

    _root = Weak[nn.Module]()

    def __init__(
        self,
        root: nn.Module,
        passes: SharedPasses,
        backend: Backend,
        is_ours: Callable[[Any], bool],
        why_not: Callable[[], str | None],
        refresh: Callable[[], Callable[[], None] | None],
    ) -> None:
        """
        Args:
            is_ours: Whether a hook of a module belongs to the engine.
            refresh: Reference to the function that commits edits of weights since the last pass.
            why_not: Function that says why no forward may share a pass now.
        """
        self._root = root
        self.passes = passes
        self._backend = backend
        self._is_ours = is_ours
        self._why_not = why_not
        self._refresh = refresh
        self._edits = passes.edits
        self._local = threading.local()
        self._lock = threading.Lock()
        self._verdicts: Recent[Hashable, Verdict] = Recent(_MOST_KINDS)
        self._state: Survey | None = None
        """What the last call found."""
        self._structure = 0
        """The modules that the verdicts are about."""
        self._findings: Recent[Hashable, int] = Recent(_MOST_KINDS)
        """For each kind, how often in a row a call was found to change something."""
        self._said: Recent[str, None] = Recent()
        self.alone: Callable[..., Any] = lambda *args, **kwargs: None
        """A call of the module that shares a pass only if its thread is a traveller's."""
        self.helpers = Helpers()
        weakref.finalize(self, self.helpers.close).atexit = False

    @property
    def turns(self) -> Any:
        return self.passes._turns

    def close(self) -> None:
        """Throw all results away that nobody called for, and end the threads."""
        self._local, self._state = threading.local(), None  # a call in progress goes on with what it has
        self.helpers.close()

    # ---------------------------------------------------------------- a call

    def call(self, args: Any, kwargs: Any) -> Any:
        """Call the module: alone, or in a pass that other forwards share."""
        turns = self.turns
        if turns.here is not None or turns._is_owned() or is_in_company() or self._backend.is_capturing():
            return self.alone(*args, **kwargs)  # inside of another call, or refused
        steps = self._steps
        state = self._state_now()
        reason = state if isinstance(state, str) else self._why_not() or _state_of_thread() or self._lock_is_shared()
        if reason is not None:
            return self._alone(steps, reason, args, kwargs)
        assert isinstance(state, Survey)
        if state.structure != self._structure:  # the modules are others than the verdicts are about
            self._structure = state.structure
            self._verdicts.clear()
            self._findings.clear()
        now = Arguments(args, kwargs)
        if now.unseen:
            what = type(now.unseen[0]).__name__
            return self._alone(
                steps, f"an input has a {what} in it, and whether that changes cannot be told", args, kwargs
            )
        found = self._result_for(steps, now, state)
        if found is not None:
            now.shared = found.arguments.shared
            steps.calls.append(now)
            return found.output
        self._begin_step(steps, now, args, kwargs)
        return self._checked(steps, now, state, args, kwargs)

    def _alone(self, steps: Steps, reason: str, args: Any, kwargs: Any) -> Any:
        """Make a call that may not share a pass."""
        self._say(reason)
        if not steps.ahead and 0 < len(steps.calls) <= len(steps.foreseen):
            steps.miss()
        self._discard(steps)
        steps.forget()
        return self.alone(*args, **kwargs)

    def _state_now(self) -> Survey | str:
        """The state of the modules, or why forwards cannot share passes."""
        known = self._state
        if known is not None and known.holds():
            return known
        found = survey(self._root, self._is_ours)
        self._state = found if isinstance(found, Survey) else None
        return found

    @property
    def _steps(self) -> Steps:
        steps: Steps | None = getattr(self._local, "steps", None)
        if steps is None:
            steps = self._local.steps = Steps()
        return steps

    def _lock_is_shared(self) -> str | None:
        return None if self.passes.turns is not None else "it shares weights with another offloaded model"

    def _result_for(self, steps: Steps, now: Arguments, state: Survey) -> Ahead | None:
        """The forward that was run with these arguments. Others are thrown away."""
        if not steps.ahead:
            return None
        found = steps.ahead.pop(0)
        is_right = found.error is None
        if is_right:
            with self.turns:
                is_right = not self.passes.were_touched()
                refresh = self._refresh()
                if refresh is not None:  # else offloading has ended meanwhile
                    refresh()  # it commits edits that the system tells of
        is_right = is_right and steps.edits == self._edits()
        is_right = is_right and steps.caller is not None and steps.caller.is_like(Caller(self._backend))
        is_right = is_right and steps.state is not None and (steps.state is state or steps.state.holds())
        if is_right and now.are_same(found.arguments):  # last: the host may wait for the device here
            if not steps.ahead:
                steps.misses.pop(steps.kinds, None)
                steps.state = None
            return found
        steps.ahead.insert(0, found)
        self._discard(steps)
        return None

    def _discard(self, steps: Steps) -> None:
        """Throw away what was not called for."""
        if steps.ahead:
            self.passes.counters.discarded += len(steps.ahead)
            if steps.miss():
                self._say("calls of a step were foreseen wrongly twice in a row")
        steps.ahead, steps.foreseen, steps.state = [], [], None

    def _begin_step(self, steps: Steps, now: Arguments, args: Any, kwargs: Any) -> None:
        """Note that a step begins, if this is its first call, and foresee the others."""
        if steps.goes_on_with(now):
            return
        if steps.calls and now.has_inference_tensors and now.first is steps.calls[0].first:
            self._say("its inputs are inference tensors, in which nobody sees changes: call it under torch.no_grad()")
        self._discard(steps)
        steps.begin(now, args, kwargs)

    def _checked(self, steps: Steps, now: Arguments, state: Survey, args: Any, kwargs: Any) -> Any:
        key, turns = now.key, self.turns
        verdict = self._verdict(key)
        at = len(steps.calls)
        if at <= MOST_CALLS:  # of a step with more calls none is foreseen
            steps.calls.append(now)
        if verdict is Verdict.APART:
            return self.alone(*args, **kwargs)
        num_callers = turns.announce()
        if verdict is Verdict.SHARED:
            ahead = self._foreseen(steps) if at == 0 else []
            output = self._travel(steps, [now, *ahead], state, args, kwargs)
        elif verdict is None:
            output = self._watched(key, now, args, kwargs)
        else:
            output = self.alone(*args, **kwargs)
        if len(steps.outputs) <= MOST_CALLS:
            steps.outputs.append(Output(output))
        verdicts = {self._verdict(each.key) for each in steps.calls}
        if at and verdicts <= {Verdict.SHARED, Verdict.WATCHED} and Verdict.WATCHED in verdicts:
            is_last = at == len(steps.foreseen) and len(steps.outputs) == at + 1
            if is_last and all(map(Arguments.are_same, steps.calls[1:], steps.foreseen)):
                self._try_step(steps, output)
        elif verdict is Verdict.WATCHED and num_callers > 1:
            self._try_with_others(now, output, args, kwargs)
        return output

    def _foreseen(self, steps: Steps) -> list[Arguments]:
        """The calls of this step that may be run beside the first."""
        if not steps.foreseen or any(self._verdict(each.key) is not Verdict.SHARED for each in steps.foreseen):
            return []
        if self._backend.has_streams and not (detection() is Detection.SCAN and self.passes.detects_edits):
            self._say("there is no quick way here to tell whether weights were edited between two calls of a step")
            return []
        return steps.foreseen

    # ---------------------------------------------------------------- together

    def _travel(self, steps: Steps, calls: list[Arguments], state: Survey, args: Any, kwargs: Any) -> Any:
        """Make a call in a pass that others may share, and run the calls that are foreseen beside it."""
        calls = calls[: self.passes.most_together]
        boarded: list[Traveller] = []
        ahead: list[Ahead] = []
        keys = [call.key for call in calls]
        before, caller = RandomStates(self._backend.device), Caller(self._backend)
        changed = self.passes.counters.changed
        try:
            output = self._run(calls, boarded, ahead, args, kwargs)
        except (torch.OutOfMemoryError, Broken) as error:
            size = boarded[0].convoy.size
            if size == 1:
                raise
            if isinstance(error, torch.OutOfMemoryError):
                self._say(f"there is no room for {size} forwards in one pass")
                self.passes.ran_out(size)
            self._put_back(keys, boarded, before)
            is_over = False
        except Exception:
            if not ahead or not self._put_back(keys, boarded, before):
                raise
            is_over = False  # what the others have drawn was put back, and so was what this one has
        else:
            self._judge_slow(keys, boarded)
            is_over = not self._put_back(keys, boarded, before)
        if not is_over:
            self.passes.counters.predicted += len(ahead)
            self.passes.counters.discarded += len(ahead)
            ahead.clear()
            self._discard(steps)
            return self.alone(*args, **kwargs)
        if ahead:
            self.passes.counters.predicted += len(ahead)
            finding = None if calls[0].are_unchanged(args, kwargs) else "it changes its inputs"
            if self.passes.counters.changed != changed:
                finding = "it changes its weights or buffers"
            if finding is not None:
                self._judge(keys, Verdict.APART, finding)
                self.passes.counters.discarded += len(ahead)
                return output
            steps.ahead, steps.state, steps.edits, steps.caller = ahead, state, self._edits(), caller
            steps.drop_with(calls[0].first)
        return output

    def _run(
        self,
        calls: Sequence[Arguments],
        boarded: list[Traveller],
        ahead: list[Ahead],
        args: Any,
        kwargs: Any,
        *,
        needs_company: bool = False,
    ) -> Any:
        """Make this thread's forward beside those of others. It returns once they are over that were begun here.

        Args:
            calls: This thread's call, and those that other threads make in its place.
            boarded: List that gets the travellers, before Ctrl-C can come in between.
            ahead: List that gets the forwards of the other threads.
            needs_company: Whether to do nothing, and return None, if nobody else shares the pass.
        """
        try:
            self.turns.board([call.shapes for call in calls], self.passes.most_together, boarded)
            if needs_company and boarded[0].convoy.size == 1:
                return None
            ahead += [
                Ahead(self.passes, self.helpers, self.alone, Caller(self._backend), traveller, call)
                for traveller, call in zip(boarded[1:], calls[1:], strict=True)
            ]
            for each in ahead:
                each.start()
            with in_company(boarded[0].convoy.size):
                output = self.alone(*args, **kwargs)
            for each in ahead:
                each.join()
            return output
        except BaseException:
            for each in ahead:
                self.turns.call_off(each.traveller)
            for each in ahead:
                each.join(tuning().traveller_patience_seconds)
            for traveller in () if ahead else boarded[1:]:
                self.turns.disembark(traveller)
            raise
        finally:
            if boarded:
                self.passes.leave(boarded[0])
            if self.passes.is_removed:  # a helper may have been started since
                self.close()

    # ---------------------------------------------------------------- checks

    def _watched(self, key: Hashable, now: Arguments, args: Any, kwargs: Any) -> Any:
        """Make a first call of its kind, and look at what it depends on."""
        if not self._lock.acquire(blocking=False):
            return self.alone(*args, **kwargs)  # another thread's call is being watched
        try:
            with self.turns:
                watch = Watch(self._root, self._backend.device)
                changed = self.passes.counters.changed
                self.passes.watch = watch
                try:
                    output = self.alone(*args, **kwargs)
                finally:
                    self.passes.watch = None
                finding = watch.end()
                if finding is None and self.passes.counters.changed != changed:
                    finding = "it changes its weights or buffers"
            if finding is None and not now.are_unchanged(args, kwargs):
                finding = "it changes its inputs"
            self._findings[key] = 0 if finding is None else self._findings.get(key, 0) + 1
            if not 0 < self._findings[key] < _MOST_FINDINGS:
                self._judge([key], Verdict.WATCHED if finding is None else Verdict.APART, finding)
            return output
        finally:
            self._lock.release()

    def _try_step(self, steps: Steps, output: Any) -> None:
        """Make the calls of this step once more, all together, and compare the bits."""
        calls, keys = steps.calls, [call.key for call in steps.calls]
        given = [call.given() for call in calls]
        if any(each is None for each in given) or not self._has_room(len(calls)):
            return
        before = RandomStates(self._backend.device)
        wanted: list[Any] = [each.tensors() for each in steps.outputs[:-1]]
        for at, each in enumerate(wanted):
            if each is None:
                args, kwargs = given[at]  # type: ignore[misc]
                wanted[at] = tensors_of(self.alone(*args, **kwargs))
        wanted.append(tensors_of(output))
        args, kwargs = given[0]  # type: ignore[misc]
        ahead: list[Ahead] = []
        boarded: list[Traveller] = []
        try:
            found = [tensors_of(self._run(calls, boarded, ahead, args, kwargs))]
        except Exception as error:
            self._put_back(keys, boarded, before)
            self._say(f"a trial failed: {type(error).__name__}: {error}")
            return
        self._judge_slow(keys, boarded)
        if self._put_back(keys, boarded, before) or any(each.error is not None for each in ahead):
            return
        found += [tensors_of(each.output) for each in ahead]
        if _share_memory(found, given):
            self._judge(keys, Verdict.APART, "it returns the same memory each time")
            return
        self._compare(keys, found, wanted)

    def _try_with_others(self, now: Arguments, output: Any, args: Any, kwargs: Any) -> None:
        """Make a call once more, together with those of other threads, and compare the bits."""
        if not self._has_room(2):
            return
        boarded: list[Traveller] = []
        try:
            found = self._run([now], boarded, [], args, kwargs, needs_company=True)
        except Exception as error:
            self._say(f"a trial failed: {type(error).__name__}: {error}")
            return
        if boarded[0].convoy.size == 1:
            return
        self._compare([now.key], [tensors_of(found)], [tensors_of(output)])

    def _compare(self, keys: list[Hashable], found: Sequence[Any], wanted: Sequence[Any]) -> None:
        if not all(map(is_plain, chain.from_iterable([*found, *wanted]))):
            self._judge(keys, Verdict.APART, "it returns tensors of a kind that is not compared")
            return
        is_same = all(are_equal(one, other) for one, other in zip(found, wanted, strict=True))
        if is_same and not any(map(len, wanted)):
            self._judge(keys, Verdict.APART, "it returns no tensors that could be compared")
            return
        finding = None if is_same else "forwards that shared a pass had other bits than those made one after another"
        self._judge(keys, Verdict.SHARED if is_same else Verdict.APART, finding)

    def _put_back(self, keys: list[Hashable], boarded: Sequence[Traveller], before: RandomStates) -> bool:
        """Let the generators go on from `before` if random numbers were drawn by these calls, and by nobody else.

        Returns:
            Whether they do.
        """
        size = boarded[0].convoy.size if boarded else 1
        if size == 1 or not self._has_drawn(keys, before) or size != len(keys) or others_may_draw():
            return False
        before.restore()
        return True

    def _has_drawn(self, keys: list[Hashable], before: RandomStates) -> bool:
        """Whether random numbers were drawn in a pass that was shared, or in another thread meanwhile."""
        has_drawn = before != RandomStates(self._backend.device)
        for key in keys:
            self._findings[key] = self._findings.get(key, 0) + 1 if has_drawn else 0
        if has_drawn and (not others_may_draw() or max(map(self._findings.__getitem__, keys)) >= _MOST_FINDINGS):
            self._judge(keys, Verdict.APART, "random numbers are drawn in it")
        return has_drawn

    def _judge_slow(self, keys: list[Hashable], boarded: Sequence[Traveller]) -> None:
        """Let forwards go apart of which one was left behind: it may wait for a lock that another one holds."""
        if any(each.is_behind for each in boarded):
            seconds = tuning().traveller_patience_seconds
            self._judge(keys, Verdict.APART, f"one stayed in code of its own for {seconds:g} s while others waited")

    def _has_room(self, num_forwards: int) -> bool:
        most = self.passes.most_together
        if most < num_forwards:
            self._say(f"there is room for {most} in one pass, not for {num_forwards}")
        return most >= num_forwards

    def _verdict(self, key: Hashable) -> Verdict | None:
        return self._verdicts.get(key)

    def _judge(self, keys: list[Hashable], verdict: Verdict, finding: str | None) -> None:
        for key in keys:
            if self._verdicts.get(key) is not Verdict.APART:
                self._verdicts[key] = verdict
        if finding is not None:
            self._say(finding)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said[reason] = None
            logger.info("Not sharing passes of %s: %s.", type(self._root).__name__, reason)


def _share_memory(outputs: Sequence[Any], given: Sequence[Any]) -> bool:
    """Whether outputs of different calls lie in the same memory, which is not that of inputs."""
    memory = [{tensor.untyped_storage().data_ptr() for tensor in each if is_plain(tensor)} for each in outputs]
    inputs = {each.untyped_storage().data_ptr() for each in tensors_of(given) if is_plain(each)}
    return len(set().union(*memory) - inputs) < sum(len(each - inputs) for each in memory)


def _state_of_thread() -> str | None:
    if torch.is_grad_enabled():
        return "gradients are enabled: call it under torch.no_grad()"
    if has_global_hooks():
        return "there is a hook for all modules of the process"
    compiler = set_eval_frame(None)
    set_eval_frame(compiler)
    if compiler:
        return "it is called in compiled code: compile its blocks instead"
    return None
