"""How a check is run: parties and grounds, one plan, one session an engine configuration, then the report."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onepolicy.engines.base import Engine, Progress, SamplingParams
from onepolicy.engines.semantics import Rules
from onepolicy.errors import OnepolicyError, UsageError
from onepolicy.estimate import LEAST_CLUSTERS
from onepolicy.gates.bounds import load
from onepolicy.legs import LEGS, SPECIAL, contract
from onepolicy.legs.base import Leg, On, Side, Want, chosen, using_for
from onepolicy.legs.floors import FloorPlan, plan_floor
from onepolicy.legs.kept import Kept, files_digest
from onepolicy.legs.plan import Ground, Party, Plan, Task, configured, plan_legs
from onepolicy.legs.run import GONE, Done, Grounds, Told, opened, run, run_tasks
from onepolicy.record import draw
from onepolicy.rollouts import Rollouts
from onepolicy.suite import Suite, encoded_prompts, fixed_rollouts
from onepolicy.suite import load as load_suite

#: For the legs that are slow: so many sequences, each from another cluster, that hold so many drawn tokens; and the
#: most tokens, prompts too, that they may hold once there are enough for an interval.
SOME_SEQUENCES, SOME_DRAWN, SOME_TOKENS = 32, 1_200, 6_000


@dataclass(frozen=True, slots=True)
class Pair:
    """The pair under test: which recorded scoring, held against which bounds, over which tokens."""

    side: str
    bounds: str | None
    view: str
    reply_length: int | None
    exact: bool


@dataclass(frozen=True, slots=True)
class Choices:
    """What a check does besides comparing the pair.

    `legs`: names of the legs to run, None for all; `skip`: names left out. `reference`, `floor`: engines for a third
    scoring and for the floor's variants. `suite`: a size of the built-in suite, or one that was loaded; `params`: how
    its prompts are drawn from. `keep`: a directory where finished scorings are stored, so that an interrupted check
    goes on. `timeout`: seconds for one request to an engine.
    """

    legs: Sequence[str] | None = None
    skip: Sequence[str] = ()
    reference: str | Engine | None = None
    floor: str | Engine | None = None
    suite: str | Suite = "default"
    params: SamplingParams = field(default_factory=SamplingParams)
    keep: Path | None = None
    timeout: float = 600.0


@dataclass(slots=True)
class Going:
    """One check under way: what was asked, the plan, what is done."""

    pair: Pair
    choices: Choices
    parties: dict[Side, Party]
    plan: Plan = field(default_factory=Plan)
    done: Done = field(default_factory=Done)
    grounds: Grounds = field(default_factory=lambda: Grounds({}))
    #: None: nobody asked
    floor: FloorPlan | None = None
    probes: contract.Probes | None = None
    #: the scorer's readings of the probes, without and with each setting, or why there are none
    reading: tuple[Task, ...] = ()
    routes: Task | None = None
    unread: str = ""
    #: what ended the sampler early
    died: OnepolicyError | None = None
    suite: dict[str, Any] = field(default_factory=dict[str, Any])
    keep: Kept | None = None
    told: Told | None = None
    progress: Progress | None = None

    @property
    def rollouts(self) -> Rollouts:
        return self.grounds.rollouts["drawn"]

    @property
    def production(self) -> Task:
        """The scorer's values for the pair under test."""
        return Task(self.parties["scorer"].config, (), "drawn", distributions=self.pair.exact)

    @property
    def view(self) -> str:
        """The tokens that legs look at: the drawn ones; all others where nothing was drawn, or they were asked for."""
        return "fixed" if self.pair.view == "fixed" or not self.rollouts.drawn.any() else "drawn"

    def asked(self, key: str) -> bool:
        return (self.choices.legs is None or key in self.choices.legs) and key not in self.choices.skip


def run_check(
    rollouts: Rollouts | None,
    sampler: str | Engine | None,
    scorer: str | Engine,
    pair: Pair,
    choices: Choices,
    told: Told | None,
    progress: Progress | None,
) -> Going:
    """Everything scored that the check needs. Without `rollouts` the sampler draws them first. See `check.check`."""
    chosen({**LEGS, **SPECIAL}, choices.legs, choices.skip)  # names are refused before anything is started
    given = {"sampler": sampler, "scorer": scorer, "reference": choices.reference, "floor": choices.floor}
    parties: dict[Any, Party] = {name: Party.of(engine) for name, engine in given.items() if engine is not None}
    for name in ("scorer", *(["sampler"] if rollouts is None else [])):
        if pair.bounds is None and _undeclared(parties[name]):  # asked before anything is started
            what = f"engine {parties[name].config}: its precision is not declared, so there are no default bounds"
            raise UsageError(f"{what}; add ?dtype=bfloat16 (or float16, float32), or pass --bounds")
    going = Going(pair, choices, parties, told=told, progress=progress)
    if choices.keep is not None:
        going.keep = Kept(choices.keep)
    if rollouts is not None:
        going.grounds = _grounds(rollouts)
    if sampler is not None:
        _sampler_session(going)
    else:
        _plan(going)
    run(going.plan, going.grounds, going.done, vital=going.production, timeout=choices.timeout, keep=going.keep,
        told=told, progress=progress)  # fmt: skip
    if going.keep is not None and going.keep.trouble and told:
        told(going.keep.trouble)
    return going


def _undeclared(party: Party) -> bool:
    """An engine that computes in whatever it does, and whose user did not say what that is."""
    switch = party.switches.get("dtype")
    return switch is not None and switch.declared and not party.options.get("dtype")


def _grounds(rollouts: Rollouts) -> Grounds:
    some = some_of(rollouts)
    return Grounds({"drawn": rollouts, "some": rollouts.take(some)}, some)


def some_of(rollouts: Rollouts) -> list[int]:
    """The first sequence of each cluster that drew anything, until `SOME_SEQUENCES` hold `SOME_DRAWN` drawn tokens; no
    more than `SOME_TOKENS` in all, but no fewer than an interval needs: long replies among short ones count for less
    than their number."""
    seen: set[str] = set()
    rows: list[int] = []
    tokens, drawn, squares = 0, 0, 0
    for i, key in enumerate(rollouts.clusters()[1]):
        here = int(rollouts.drawn[rollouts.sequence(i)].sum())
        if key in seen or not here:
            continue
        full = tokens + int(rollouts.lengths[i]) > SOME_TOKENS
        full |= len(rows) >= SOME_SEQUENCES and drawn >= SOME_DRAWN
        if full and drawn**2 >= (LEAST_CLUSTERS + 4) * squares > 0:  # effective clusters
            break
        seen.add(key)
        rows.append(i)
        tokens, drawn, squares = tokens + int(rollouts.lengths[i]), drawn + here, squares + here**2
    return rows or list(range(min(len(rollouts), SOME_SEQUENCES)))


def _plan(going: Going) -> None:
    """Tasks of the pair, of the legs and of the floor, in the order in which they should be run."""
    rollouts, parties, plan = going.rollouts, going.parties, going.plan
    plan.add(parties["scorer"], going.production)
    side = rollouts.scorings.get(going.pair.side)
    neutral = is_neutral(rollouts)
    on = frozenset(going.grounds.rollouts)
    ground = Ground(on, side is not None, neutral)
    legs = chosen({**LEGS, **SPECIAL}, going.choices.legs, going.choices.skip)
    plan_legs([leg for leg in legs if isinstance(leg, Leg)], parties, ground, plan)
    if _wants_floor(going) and side is not None:
        grounds: list[On] = [g for g in ("drawn", "texts") if g in on]
        going.floor = plan_floor(parties, side.fingerprint, side.dtype, grounds, plan)
    _plan_readings(going)
    _plan_routes(going, neutral)


def _wants_floor(going: Going) -> bool:
    """Not where the pair alone was asked for, nor where it is held against bounds of the user's without a floor."""
    if going.choices.legs is not None and not len(going.choices.legs):
        return False
    bounds = going.pair.bounds
    return bounds is None or any(b.metric.startswith("gap_over_floor") for b in load(bounds).bounds)


def is_neutral(rollouts: Rollouts) -> bool:
    """Whether what the log-probs are declared to mean is raw in effect: temperature 1, nothing cut, no penalties."""
    names = ("logprob_semantics", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
             "frequency_penalty")  # fmt: skip
    rows = {tuple(rollouts.record(name, i) for name in names) for i in range(len(rollouts))}
    try:
        return all(Rules.of(dict(zip(names, row, strict=True))) == Rules() for row in rows)
    except (TypeError, OnepolicyError):
        return False  # something is not declared: the scorer says what


def _sampler_session(going: Going) -> None:
    """One start of the sampler: it draws, answers the probes, and scores what its own legs need. What an interrupted
    run of the same check kept is taken from there."""
    party, choices = going.parties["sampler"], going.choices
    suite = _suite(choices)
    given = going.grounds.rollouts.get("drawn")
    asked = {"sampler": party.config, "suite": suite.version, "params": asdict(choices.params), "file": _digest(given),
             "the sampler's files": files_digest(party.config)}  # fmt: skip
    keep = going.keep if party.engine is None else None  # one that was given running may draw otherwise the next time
    if keep is not None and (found := keep.grounds(asked)) is not None:
        _restore(going, *found)
        if _wanted_of_sampler(going) <= set(found[1].get("wanted", ())):
            _plan(going)
            return
    if going.told:
        going.told(f"{party.config}: {'its legs' if given is not None else 'drawing, then its legs'}")
    with opened(party, choices.timeout) as engine:
        fingerprint = going.done.fingerprints[party.config] = engine.fingerprint()
        try:
            _draw_and_encode(going, engine, suite, fingerprint.get("max_model_len"))
            if keep is not None:
                keep.put_grounds(asked, *_kept_grounds(going))
            _plan(going)
            run_tasks(engine, going.plan.tasks.get(party.config, []), going.grounds, going.done, keep=going.keep,
                      progress=going.progress)  # fmt: skip
        except GONE as err:
            if "drawn" not in going.grounds.rollouts:
                raise
            going.died = err
            if not going.plan.configs:
                _plan(going)
            for task in going.plan.tasks.get(party.config, []):
                if task not in going.done.scorings:
                    going.done.failures.setdefault(task, err)


def _draw_and_encode(going: Going, engine: Engine, suite: Suite, limit: int | None) -> None:
    """What the sampler alone can give: its draws, the answers to the probes, the fixed texts in its ids."""
    params, wanted = going.choices.params, _wanted_of_sampler(going)
    draws, probes = "drawn" not in going.grounds.rollouts, "probes" in wanted and engine.SAMPLES
    prompts, ids, left_out = (
        encoded_prompts(suite, engine, limit, params.max_tokens) if draws or probes else ([], [], [])
    )
    if draws:
        going.grounds = _grounds(draw(engine, [p.prompt for p in prompts], params, ids=ids, progress=going.progress))
        going.suite = {"size": suite.size, "version": suite.version, "prompts": len(prompts), "left_out": left_out}
    if probes and going.probes is None:
        going.probes = contract.draw_probes(engine, ids)
    if "texts" in wanted and "texts" not in going.grounds.rollouts:
        _texts(going, engine, suite, limit)


def _wanted_of_sampler(going: Going) -> set[str]:
    """What the legs need of the sampler besides its draws."""
    texts = any(going.asked(key) for key in ("fixed-texts", "same-function-texts"))
    return ({"probes"} if going.asked("contract") else set()) | ({"texts"} if texts else set())


def _digest(rollouts: Rollouts | None) -> str | None:
    return None if rollouts is None else hashlib.sha256(rollouts.token_ids.tobytes()).hexdigest()[:16]


def _kept_grounds(going: Going) -> tuple[dict[str, Rollouts], dict[str, Any]]:
    grounds = {k: v for k, v in going.grounds.rollouts.items() if k in ("drawn", "texts")}
    noted: dict[str, Any] = {"suite": going.suite, "wanted": sorted(_wanted_of_sampler(going))}
    probes = going.probes
    if probes is not None:
        noted |= {"probes": probes.names, "refused": probes.refused}
        if probes.rollouts is not None:
            more = probes.rollouts
            grounds["probes"] = more if probes.prompted is None else more.with_scoring("prompted", probes.prompted)
    return grounds, noted


def _restore(going: Going, grounds: dict[str, Rollouts], noted: dict[str, Any]) -> None:
    going.suite = noted["suite"]
    if "drawn" not in going.grounds.rollouts:
        going.grounds = _grounds(grounds["drawn"])
    if "texts" in grounds:
        going.grounds.rollouts["texts"] = grounds["texts"]
    if "probes" in noted:
        drawn = grounds.get("probes")
        prompted = None if drawn is None else drawn.scorings.get("prompted")
        going.probes = contract.Probes(drawn, tuple(noted["probes"]), noted["refused"], prompted)


def _suite(choices: Choices) -> Suite:
    return choices.suite if isinstance(choices.suite, Suite) else load_suite(choices.suite)


def _plan_routes(going: Going, neutral: bool) -> None:
    """The experts that the sampler chooses for the drawn tokens, where its engine tells them."""
    party = going.parties.get("sampler")
    if party is None or not party.options.get("routes") or not going.asked("routes"):
        return
    live = using_for(Want("sampler", using=({"path": "prefill"}, {})), party.spec.name, party.switches, party.options)
    task = Task(party.config, tuple(sorted(live.items())), "drawn", not neutral)
    going.routes = going.plan.add(party, task)


def _plan_readings(going: Going) -> None:
    """The two readings of the probes that a scorer is asked for: without each setting, and with it."""
    if going.probes is None:
        return
    reader = next((p for name in ("floor", "scorer", "reference") if (p := going.parties.get(name)) and p.rules), None)
    if reader is None:
        going.unread = "no scorer here computes log-probs with and without a setting (name one with --floor hf:MODEL)"
        return
    if going.probes.rollouts is None:
        going.unread = "the sampler refused every setting"
        return
    going.grounds.rollouts["probes"] = contract.processed(going.probes.rollouts)
    declared = {"semantics": "declared"} if reader.options.get("semantics", "declared") != "declared" else {}
    reader = configured(reader, Want("scorer", load=declared))
    going.reading = tuple(Task(reader.config, (), "probes", raw) for raw in (True, False))
    for task in going.reading:
        going.plan.add(reader, task)


def _texts(going: Going, engine: Engine, suite: Suite, limit: int | None) -> None:
    """The suite's fixed texts in the sampler's ids, where it can score given tokens."""
    if not engine.SCORES or not suite.texts:
        return
    # one token is drawn behind a text where prompts are scored by drawing
    rollouts, left_out = fixed_rollouts(suite, engine, limit - 1 if limit else None)
    going.grounds.rollouts["texts"] = rollouts
    going.suite |= {"texts": len(rollouts), "left_out": [*going.suite.get("left_out", []), *left_out]}
    going.suite |= {"size": suite.size, "version": suite.version}
