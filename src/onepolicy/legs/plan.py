"""From legs to work: which scorings are needed, by which configuration of which engine, each asked for once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onepolicy.engines.base import Engine, EngineSpec
from onepolicy.engines.model_files import model_directory, stored_dtypes
from onepolicy.engines.open import engine_class, named
from onepolicy.errors import OnepolicyError
from onepolicy.legs.base import CannotRun, Leg, On, Side, Want, current_options, load_for, using_for, with_options
from onepolicy.legs.routes import is_mixture


@dataclass(frozen=True, slots=True)
class Party:
    """One side of a check: an engine by its spec, or one that runs already (then nothing else can be loaded).

    `rules`: it scores at whatever settings are declared; `stored`: the precision of the weights on disk, if known.
    """

    spec: EngineSpec
    switches: Mapping[str, Any]
    options: Mapping[str, Any]
    engine: Engine | None = None
    rules: bool = False
    heavy: bool = False
    stored: str | None = None

    @classmethod
    def of(cls, engine: str | Engine) -> Party:
        """Errors: `UnknownName`, `UsageError` for a spec that is wrong."""
        if isinstance(engine, str):
            spec = named(EngineSpec.parse(engine))
            found = engine_class(spec.name)
            if "routes" in found.SWITCHES and "routes" not in spec.options and is_mixture(spec):
                spec = with_options(spec, {"routes": True})
            rules = getattr(found, "RULES", False)
            return cls(spec, found.SWITCHES, current_options(found, spec), None, rules, found.HEAVY, stored_dtype(spec))
        switches = engine.SWITCHES
        said = engine.fingerprint()
        options = {k: said.get(k, s.default) for k, s in switches.items()}
        spec = EngineSpec(engine.NAME, f"running-{id(engine)}")
        return cls(spec, switches, options, engine, getattr(engine, "RULES", False))

    @property
    def config(self) -> str:
        return str(self.spec)


@dataclass(frozen=True, slots=True)
class Task:
    """One scoring: by which configuration, with which live switches, of which tokens, at which meaning, in which call
    (0, or 1 and 2 of two that are compared)."""

    config: str
    using: tuple[tuple[str, Any], ...]
    on: On
    raw: bool = False
    call: int = 0
    distributions: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """A leg with its two tasks; None stands for the values recorded with the draw."""

    leg: Leg
    a: Task | None
    b: Task


@dataclass(slots=True)
class Plan:
    """`configs`: what to start, in order, each once. `not_run`: leg -> why."""

    configs: dict[str, Party] = field(default_factory=dict[str, Party])
    tasks: dict[str, list[Task]] = field(default_factory=dict[str, list[Task]])
    legs: list[Planned] = field(default_factory=list[Planned])
    not_run: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, party: Party, task: Task) -> Task:
        """The task, asked for; one that is there already is not asked twice."""
        self.configs.setdefault(task.config, party)
        tasks = self.tasks.setdefault(task.config, [])
        if task not in tasks:
            tasks.append(task)
        return task


@dataclass(frozen=True, slots=True)
class Ground:
    """What there is to score: which tokens, whether the draw was recorded, whether its meaning is raw in effect."""

    on: frozenset[str]
    recorded: bool
    neutral: bool


def plan_legs(legs: Iterable[Leg], parties: Mapping[Side, Party], ground: Ground, plan: Plan) -> Plan:
    """`plan` with the tasks of every leg that can be run, and a reason for each that cannot."""
    for leg in legs:
        try:
            plan.legs.append(_planned(leg, parties, ground, plan))
        except CannotRun as err:
            plan.not_run[leg.key] = str(err)
    return plan


def _planned(leg: Leg, parties: Mapping[Side, Party], ground: Ground, plan: Plan) -> Planned:
    if leg.on not in ground.on:
        raise CannotRun("no fixed texts" if leg.on == "texts" else "no drawn tokens")
    if leg.only_set and ground.neutral:
        raise CannotRun("the draw had no settings to apply")
    found = [_task(want, leg, parties, ground) for want in (leg.a, leg.b)]
    a, b = (task for _, task in found)
    if a is not None and a == b:
        if leg.code != "not-repeatable":
            raise CannotRun("both sides of it are one and the same here")
        a, b = replace(a, call=1), replace(a, call=2)  # neither is a part of what was scored in other batches
    assert b is not None
    for party, task in ((found[0][0], a), (found[1][0], b)):
        if party is not None and task is not None:
            plan.add(party, task)
    return Planned(leg, a, b)


def _task(want: Want, leg: Leg, parties: Mapping[Side, Party], ground: Ground) -> tuple[Party | None, Task | None]:
    if want.recorded:
        if not ground.recorded:
            raise CannotRun("the sampler's values were not recorded")
        return None, None
    if want.side not in parties:
        raise CannotRun(_ABSENT[want.side])
    party = configured(parties[want.side], want)
    using = using_for(want, party.spec.name, party.switches, party.options)
    return party, Task(party.config, tuple(sorted(using.items())), leg.on, leg.raw and not ground.neutral)


_ABSENT = {
    "sampler": "no sampler engine was given (--sampler)",
    "scorer": "no scorer engine was given (--scorer)",
    "reference": "no reference was given (--reference)",
    "floor": "no engine for the floor was given",
}


def configured(party: Party, want: Want) -> Party:
    """The party at the want's load options. Errors: `CannotRun`."""
    dtype = str(party.options.get("dtype") or "")
    load = {k: _filled(v, dtype, party.stored) for k, v in want.load.items()}
    if party.engine is not None and load_for(replace(want, load=load), party.spec.name, party.switches, party.options):
        raise CannotRun("the engine was given running, so it cannot be loaded in another way")
    changed = load_for(replace(want, load=load), party.spec.name, party.switches, party.options)
    if not changed:
        return party
    spec = with_options(party.spec, changed)
    return replace(party, spec=spec, options={**party.options, **changed})


def _filled(value: Any, dtype: str, stored: str | None) -> Any:
    """`{dtype}`: the side's own precision; weights that are stored in it, or computed in float32, need no rounding."""
    if value != "{dtype}":
        return value
    return "none" if dtype in ("float32", "float64", "", stored) else dtype


def stored_dtype(spec: EngineSpec) -> str | None:
    """The one precision of a model directory's weights, None where there is none or it is not known."""
    if spec.name.rpartition(":")[2] not in ("hf", "vllm"):
        return None
    try:
        found = stored_dtypes(model_directory(spec.target, spec.name))
    except (OnepolicyError, OSError, ValueError):
        return None  # whoever loads it says what is wrong
    return next(iter(found)) if len(found) == 1 else None
