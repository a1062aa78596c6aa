"""The best order by OR-Tools' CP-SAT, as an independent judge of searched orders."""

from ipu_pipeline.engine.schedules.order_problems import FORWARD, INPUTS, WEIGHTS

KINDS = (FORWARD, INPUTS, WEIGHTS)


def find_smallest_time(problem, seconds=60):
    """The smallest step time of a problem whose times are integers; None if CP-SAT does not prove it."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    stages, numbers = range(problem.num_stages), range(problem.num_micro_batches)
    times = [list(map(round, own)) for own in problem.times]
    transfers = sum(problem.forward_transfers) + sum(problem.backward_transfers)
    horizon = len(numbers) * (sum(map(sum, times)) + transfers)
    begins = {
        (kind, stage, number): model.new_int_var(0, horizon, "")
        for kind in KINDS
        for stage in stages
        for number in numbers
    }

    def end(kind, stage, number):
        return begins[kind, stage, number] + times[kind][stage]

    def send(kind, source, target, time):
        last = None
        for number in numbers:
            arrival = model.new_int_var(0, horizon, "")
            model.add(arrival >= end(kind, source, number) + time)
            if last is not None:
                model.add(arrival >= last + time)
            model.add(begins[kind, target, number] >= arrival)
            last = arrival

    for stage in stages[1:]:
        send(FORWARD, stage - 1, stage, problem.forward_transfers[stage - 1])
        send(INPUTS, stage, stage - 1, problem.backward_transfers[stage - 1])
    latest = model.new_int_var(0, horizon, "")
    for stage in stages:
        for number in numbers:
            model.add(begins[INPUTS, stage, number] >= end(FORWARD, stage, number))
            model.add(begins[WEIGHTS, stage, number] >= end(INPUTS, stage, number))
            model.add(latest >= end(WEIGHTS, stage, number))
            if problem.is_both(stage):
                model.add(begins[INPUTS, stage, number] == end(FORWARD, stage, number))
            if number:
                for kind in KINDS:
                    model.add(begins[kind, stage, number] >= end(kind, stage, number - 1))
    for ipu, own in enumerate(problem.stages_of):
        model.add_no_overlap(
            model.new_fixed_size_interval_var(begins[kind, stage, number], times[kind][stage], "")
            for kind in KINDS
            for stage in own
            for number in numbers
            if times[kind][stage]
        )
        if problem.num_bytes_per_ipu is None:
            continue
        parts, sizes = [], []
        for stage in own:
            for number in numbers:
                bounds = [begins[FORWARD, stage, number]]
                bounds += [end(kind, stage, number) for kind in (INPUTS, WEIGHTS)]
                held = problem.num_held_bytes[stage], problem.num_between_bytes[stage]
                for first, last, size in zip(bounds[:-1], bounds[1:], held, strict=True):
                    length = model.new_int_var(0, horizon, "")
                    parts.append(model.new_interval_var(first, length, last, ""))
                    sizes.append(size)
        model.add_cumulative(parts, sizes, round(problem.num_free_bytes[ipu]))
    model.minimize(latest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    return round(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None
