"""The sizing problem as one mixed-integer linear program.

A layout s (groups p, M, N; micro-batch b; side of the shared experts) and a policy k (recompute, sharding, q in flight) are
chosen by binaries z_s and y_k, coupled through their family (p, b, side). The step model is a maximum over resources times fill
times stall, so with rates instead of times it is linear. Let Q be sequences per second before stalls, Q = sum_k Q_k where only
the chosen policy's Q_k may be positive; the rate of the step is then sum_k Q_k / stall_k.

    maximise  sum_k Q_k / stall_k                                                                    named in the model as
    sum_s z_s = 1,  sum_k y_k = 1                                                                    layout, policy
    sum_{k in c} y_k = sum_{s in c} z_s                 each family c                                family
    Q_k <= best_k y_k                                   best_k: no layout of its family is faster    chosen
    sum_k a_k Q_k <= sum_s (M_s / fill_s) z_s           a_k: GPU seconds of attention a sequence     compute[attention]
    sum_{k: r} Q_k <= sum_s z_s / (fill_s f_sr)         r: experts recomputed or not                 compute[ffn][r]
    Q <= sum_s z_s / (fill_s v_s)                       v_s: NIC seconds over the group's NICs       exchange[c], link[ffn]
    sum_k need_k y_k <= sum_s M_s z_s                   replicas that make the sharded state fit     memory[attention]
    sum_{k: r} held_k y_k <= sum_s room_sr z_s                                                       memory[ffn][r]
    sum_k (2 q_k - 1) y_k <= sum_s n_s z_s                                                           in_flight

The rows from `chosen` to `in_flight` are written once a family, over its own layouts and policies: then the relaxation cannot
pay one family's work with another's GPUs, and is nearly always integral. `held_k` counts resident activations, `room_sr` how
many fit beside the weights: a product of both choices became a comparison of two numbers, as only one of each is chosen.
Policies whose attention memory fits with no number of replicas are left out.
Where NICs are free, an attention group's count is an integer, and Q = sum_s Q_s with Q_s <= best_s z_s:

    sum_s fill_s v_s Q_s <= nics_c,   nics_A + nics_F <= sum_s nics(p_s) z_s,   nics_c >= 1          exchange[c], nics

So the program grows with the SUM of the two choices, not with their product, and not at all with the NICs. Rates are in units of
a bound on the best one, GPUs, NICs and counts in units of their largest number: coefficients stay near 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from disagmoe_compile.planner.highs import LinearModel, Solution
from disagmoe_compile.planner.sizing_problem import Family, Layout, Policy, SizingProblem
from disagmoe_compile.planner.step_model import StepModel, stall_factor

FamilyPolicy = tuple[Family, Policy]


class SizingProgram:
    """The linear model of the module docstring, and the way back from its values to a choice."""

    def __init__(
        self,
        problem: SizingProblem,
        model: StepModel,
        layouts: Sequence[Layout],
        cuts: Collection[tuple[Layout, Policy]],
    ) -> None:
        self.problem, self.model, self.linear = problem, model, LinearModel()
        self._limit_cache: dict[tuple[Layout, bool], dict[str, float]] = {}
        self.policies = self._fitting_policies({s.family for s in layouts})
        families = {family for family, _ in self.policies}
        self.layouts = [s for s in layouts if s.family in families and self._has_nics(s)]
        remaining = {s.family for s in self.layouts}
        self.policies = [(c, k) for c, k in self.policies if c in remaining]
        self.is_possible = bool(self.layouts and self.policies)
        if self.is_possible:
            self._build(cuts)

    def _has_nics(self, layout: Layout) -> bool:
        return not self.problem.options.free_nics or self.problem.nics_of_pair(layout.pipeline_groups) >= 2

    def _fitting_policies(self, families: Iterable[Family]) -> list[FamilyPolicy]:
        """Those whose attention ranks fit with some number of replicas, without recompute or sharding that gains nothing."""
        fitting = []
        for family in sorted(families):
            needed = {
                k: self._replicas_needed(family, k) for k in self.problem.policies(family.pipeline_groups)
            }
            fitting += [
                (family, k)
                for k, replicas in needed.items()
                if replicas < math.inf
                and not any(needed.get(simpler, math.inf) <= replicas for simpler in _simpler(k))
            ]
        return fitting

    def _replicas_needed(self, family: Family, policy: Policy) -> float:
        """M from which an attention rank's memory suffices; infinite where it never does."""
        state = self.problem.options.state
        probe = Layout(family.pipeline_groups, 1, 1, family.micro_batch_size, 1, family.shared_on_ffn)
        parameters = self.model.attention_parameters(family.pipeline_groups, family.shared_on_ffn)
        held = family.micro_batch_size * self.model.attention_held_bytes(probe, policy)
        kept = parameters * (state.weight_bytes + state.gradient_bytes)
        room = self.problem.memory_bytes - held - kept
        sharded = parameters * state.optimizer_bytes
        if policy.shard_optimizer:
            return math.ceil(sharded / room) if room > 0 else math.inf
        return 0.0 if sharded <= room else math.inf

    def _build(self, cuts: Collection[tuple[Layout, Policy]]) -> None:
        linear = self.linear
        self._z = {s: f"z{i}" for i, s in enumerate(self.layouts)}
        self._y = {k: f"y{i}" for i, k in enumerate(self.policies)}
        self._q = {k: f"q{i}" for i, k in enumerate(self.policies)}
        for name in (*self._z.values(), *self._y.values()):
            linear.variable(name, upper=1, is_integer=True)
        linear.equal("layout", dict.fromkeys(self._z.values(), 1), 1)
        members = self._families()
        rates = {c: self._best_rates(c, *m) for c, m in members.items()}
        self._unit = max(rate for of_family in rates.values() for rate in of_family.values())
        linear.variable("rate", upper=1)
        linear.maximise("rate")
        for family, (layouts, policies) in members.items():
            terms = {**dict.fromkeys((self._y[k] for k in policies), 1.0)}
            linear.equal("family", _difference(terms, dict.fromkeys((self._z[s] for s in layouts), 1.0)), 0)
            self._add_rates(layouts, policies, rates[family])
            self._add_memory(layouts, policies)
            self._add_in_flight(layouts, policies)
        stalled = {q: 1 / stall_factor(c.pipeline_groups, k.in_flight) for (c, k), q in self._q.items()}
        linear.equal("rate", _difference({"rate": 1.0}, stalled), 0)
        if self.problem.options.free_nics:
            self._add_free_nics(members, rates)
        for layout, policy in cuts:
            if layout in self._z and (layout.family, policy) in self._y:
                linear.at_most("cut", {self._z[layout]: 1, self._y[layout.family, policy]: 1}, 1)

    def _families(self) -> dict[Family, tuple[list[Layout], list[FamilyPolicy]]]:
        members: dict[Family, tuple[list[Layout], list[FamilyPolicy]]] = {}
        for layout in self.layouts:
            members.setdefault(layout.family, ([], []))[0].append(layout)
        for family, policy in self.policies:
            members[family][1].append((family, policy))
        return members

    def _best_rates(
        self, family: Family, layouts: Sequence[Layout], policies: Sequence[FamilyPolicy]
    ) -> dict[FamilyPolicy, float]:
        """Of each policy a rate, in sequences a second before stalls, that no layout of the family exceeds."""
        most_gpus = max(self._gpus(s) for s in layouts)
        best = {}
        for recompute in (False, True):
            best[recompute] = max(min(self._limits(s, recompute).values()) for s in layouts)
        rates = {}
        for key in policies:
            seconds = self.model.attention_s(
                family.pipeline_groups, family.shared_on_ffn, key[1].recompute_attention
            )
            rates[key] = min(_ratio(most_gpus, seconds), best[key[1].recompute_ffn])
        return rates

    def _add_rates(
        self,
        layouts: Sequence[Layout],
        policies: Sequence[FamilyPolicy],
        best: Mapping[FamilyPolicy, float],
    ) -> None:
        linear, unit = self.linear, self._unit
        for key in policies:
            linear.variable(self._q[key], upper=1)
            linear.at_most("chosen", {self._q[key]: 1, self._y[key]: -best[key] / unit}, 0)
        most = max(self._gpus(s) for s in layouts)
        busy = {
            self._q[c, k]: self.model.attention_s(c.pipeline_groups, c.shared_on_ffn, k.recompute_attention)
            * unit
            for c, k in policies
        }
        gpus = {self._z[s]: self._gpus(s) for s in layouts}
        linear.at_most("compute[attention]", _difference(busy, gpus, 1 / most), 0)
        for recompute in (False, True):
            of_policy = {self._q[k]: 1.0 for k in policies if k[1].recompute_ffn is recompute}
            if of_policy:
                limits = {
                    self._z[s]: min(1.0, self._limits(s, recompute)["compute[ffn]"] / unit) for s in layouts
                }
                linear.at_most("compute[ffn]", _difference(of_policy, limits), 0)
        for resource in ("exchange[attention]", "exchange[ffn]", "link[ffn]"):
            limits = {self._z[s]: min(1.0, self._limits(s, False)[resource] / unit) for s in layouts}
            everything = {self._q[k]: 1.0 for k in policies}
            linear.at_most(resource, _difference(everything, limits), 0)

    def _gpus(self, layout: Layout) -> float:
        """Attention GPUs of a group, less what filling the pipeline leaves idle."""
        return layout.attention_group_size / self.model.fill(layout)

    def _limits(self, layout: Layout, recompute: bool) -> dict[str, float]:
        """Sequences a second that a layout allows on the other resources, before stalls."""
        if (layout, recompute) not in self._limit_cache:
            model, fill = self.model, self.model.fill(layout)
            attention, ffn = next(self.problem.nics_of_groups(layout))
            if self.problem.options.free_nics:  # what no split into whole ones exceeds
                attention, ffn = model.even_nics(layout, self.problem.nics_of_pair(layout.pipeline_groups))
            self._limit_cache[layout, recompute] = {
                "compute[ffn]": _ratio(1, model.ffn_s(layout, recompute) * fill),
                "exchange[attention]": _ratio(attention, model.attention_nic_s(layout) * fill),
                "exchange[ffn]": _ratio(ffn, model.ffn_nic_s(layout) * fill),
                "link[ffn]": _ratio(1, model.ffn_link_s(layout) * fill),
            }
        return self._limit_cache[layout, recompute]

    def _add_free_nics(
        self,
        members: Mapping[Family, tuple[list[Layout], list[FamilyPolicy]]],
        best: Mapping[Family, Mapping[FamilyPolicy, float]],
    ) -> None:
        linear, model, unit = self.linear, self.model, self._unit
        pairs = {s: self.problem.nics_of_pair(s.pipeline_groups) for s in self.layouts}
        most = max(pairs.values())
        for role in ("attention", "ffn"):
            linear.variable(f"nics[{role}]", lower=1, upper=most - 1, is_integer=True)
        shares = {self._z[s]: float(count) for s, count in pairs.items()}
        linear.at_most("nics", _difference({"nics[attention]": 1, "nics[ffn]": 1}, shares, 1 / most), 0)
        rates = {s: f"r{i}" for i, s in enumerate(self.layouts)}
        for family, (layouts, policies) in members.items():
            for s in layouts:
                linear.variable(rates[s], upper=1)
                linear.at_most("chosen", {rates[s]: 1, self._z[s]: -max(best[family].values()) / unit}, 0)
            sums = _difference(
                dict.fromkeys((self._q[k] for k in policies), 1.0),
                dict.fromkeys((rates[s] for s in layouts), 1.0),
            )
            linear.equal("rates", sums, 0)
        for role, seconds in (("attention", model.attention_nic_s), ("ffn", model.ffn_nic_s)):
            used = {name: seconds(s) * model.fill(s) * unit for s, name in rates.items()}
            linear.at_most(f"exchange[{role}]", _difference(used, {f"nics[{role}]": 1}, 1 / most), 0)

    def _add_memory(self, layouts: Sequence[Layout], policies: Sequence[FamilyPolicy]) -> None:
        replicas = {self._z[s]: float(s.attention_group_size) for s in layouts}
        most = max(replicas.values())
        needed = {self._y[k]: min(self._replicas_needed(*k), most + 1) for k in policies}
        self.linear.at_most("memory[attention]", _difference(needed, replicas, 1 / most), 0)
        held = {k: self.model.ffn_resident(k[0].pipeline_groups, k[1].in_flight) for k in policies}
        most = max(held.values())
        for recompute in (False, True):
            held_by = {self._y[k]: held[k] for k in policies if k[1].recompute_ffn is recompute}
            if held_by:
                room = {self._z[s]: min(self._room(s, recompute), most) for s in layouts}
                self.linear.at_most("memory[ffn]", _difference(held_by, room, 1 / most), 0)

    def _add_in_flight(self, layouts: Sequence[Layout], policies: Sequence[FamilyPolicy]) -> None:
        counts = {self._z[s]: s.n_microbatches for s in layouts}
        most = max(counts.values())
        needed = {self._y[c, k]: min(2 * k.in_flight - 1, most + 1) for c, k in policies}
        self.linear.at_most("in_flight", _difference(needed, counts, 1 / most), 0)

    def _room(self, layout: Layout, recompute: bool) -> float:
        """How many resident activations fit on an FFN rank beside its state; below 1 none."""
        kept, working = self.model.ffn_activation_bytes(layout, recompute)
        room = self.problem.memory_bytes - self.model.ffn_state_bytes(layout) - working
        return _ratio(max(room, 0.0), kept)

    def chosen(self, solution: Solution) -> tuple[Layout, Policy]:
        values = solution.values
        layout = max(self.layouts, key=lambda s: values[self._z[s]])
        policies = [k for k in self.policies if k[0] == layout.family]
        return layout, max(policies, key=lambda k: values[self._y[k]])[1]

    def tokens_per_s(self, rate: float) -> float:
        return rate * self._unit * self.problem.costs.seq_length


def _simpler(policy: Policy) -> Iterator[Policy]:
    """At least as fast, and never with less memory in use on attention ranks."""
    if policy.recompute_attention:
        yield replace(policy, recompute_attention=False)
    if policy.shard_optimizer:
        yield replace(policy, shard_optimizer=False)


def _ratio(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else math.inf


def _difference(
    used: Mapping[str, float], available: Mapping[str, float], scale: float = 1.0
) -> dict[str, float]:
    """Terms of `used - available`, scaled."""
    terms = {name: value * scale for name, value in used.items()}
    for name, value in available.items():
        terms[name] = terms.get(name, 0.0) - value * scale
    return terms
