"""Which positions one pass looks at, where that is not the raster window: several rows at once, or row by row.

Rows (PJD, arXiv 2606.05703; ZipAR, arXiv 2412.04062): a row opens when the row above has some columns, and has a short
window of its own, which ends where the row above has got to. An input sees the decided tokens before it and the drafts
of its own row, never those of another (row-causal mask). A row lacks the rest of the rows above: lossy, unless it waits
for the whole row above.

Row block (training-free form of SSD, arXiv 2606.20543): the first row by a window; every further row is drafted as a
whole from the row above, corrected in some rounds of the coupling kernel, and committed. Rows drafted together are
staged: the first is committed after its rounds, the next after some more of its own (see `rounds_of`). SSD itself is
the same with drafts from trained heads (see `spatial`).

Both are one mechanism: windows that end with their row, and a rule for what is committed (see `Rows.commit`).
"""

import numpy as np
import torch

from .layout_state import Lines, LineState, Look
from .models.session import fixed_shapes

CONTEXT = 0.25  # share of the columns that a row must have before the next one opens, where nobody says otherwise


def context_columns(method, plan, context):
    """Columns that a row must have before the next one opens; `context` as in `Settings.row_context`."""
    if method.layout != "rows":
        return plan.cols
    return max(1, min(round(CONTEXT * plan.cols) if context < 0 else context, plan.cols))


def rounds_of(down, rounds):
    """Passes after which the `down`-th row of a block is committed as it is; works on arrays.

    A further row has been corrected together with those before it, so it has one round less of its own: with 5 rounds
    5 and then 4, the paper's staged mode.
    """
    return rounds + (down - 1).clip(0) * (rounds - 1)


def keeps_law(method, plan, context, rounds, block=1):
    """Are the tokens those of the model's law? Only where rows come one after another and none is cut short."""
    if not method.every_row:
        return False
    if plan.frames * plan.rows == 1:
        return True
    if method.layout == "rows":
        return context_columns(method, plan, context) == plan.cols
    # after round t the first t positions are right (Jacobi ends after so many rounds)
    return rounds == 0 or rounds >= plan.cols + (block > 1)


def inputs_of_pass(method, plan, window, context, block=1):
    """About how many inputs a pass of one sample has, for estimates of memory."""
    columns = context_columns(method, plan, context)
    under_way = min(plan.frames * plan.rows, -(-plan.cols // columns) + 1)
    each = block * plan.cols if method.layout == "row-block" else min(window or method.window, plan.cols)
    return under_way * (each + 1)


def lanes_of(method, plan, lines, window, context):
    """Inputs that a pass of fixed shape has, or a multiple of them (see `session.fixed_shapes`).

    Side by side: a window ends where the row above has got to, so all of them together fit into one row, short ones
    into less. That is one size; many given tokens at once, or rows that crowd, take twice as many, or three times.

    Row blocks: picture rows, as many as a pass needs: those of the block, and some more while what was committed after
    its rounds is put into the cache. One size for all would leave half of it empty.

    So 55 to 95 % of the inputs are real (16x16 and 24x24 at usual settings; zipar 70 to 75, pjd and pjd-c 65 to 85).

    Args:
        window: free positions of a row. context: columns of a row that open the next one.
    """
    if method.layout == "row-block":
        return int(lines.size[0])
    row, under_way = int(lines.size.max()), -(-plan.cols // context)
    if under_way == 1:
        return min(row, window)
    # a finished row's last token comes by itself; so may a waiting row's, but for windows of one position
    return min(row, under_way * (window + (window > 1))) + 1


class Rows:
    """Looks at rows and commits them, for a `loop.Run`.

    Args:
        plan: `TokenPlan`. method: `Method` with a layout of its own. settings: `Settings`. start: `Start`.
        window: free positions of a row. fixed: int64 array [A, N] given tokens. noise: `Noise` of the active samples.
        prefix: positions that are given for every sample and in the cache, but for the last one.
        forecast: `Forecast` that makes the first drafts, or None: by `start`.
    """

    def __init__(self, plan, method, settings, window, start, fixed, noise, prefix, device, forecast=None):
        self.plan, self.method, self.start = plan, method, start
        blocks = method.layout == "row-block"
        self.lines = lines = Lines(plan, settings.block_rows if blocks else 1)
        self.context = context_columns(method, plan, settings.row_context)
        self.width = np.full(len(lines), window)
        self.due = np.zeros(plan.length, dtype=np.int64)  # passes until a position is committed as it is; 0: never
        if blocks:
            self.context, self.width[1:] = int(lines.size.max()), lines.size[1:]
            if settings.rounds:
                self.due = np.where(lines.line > 0, rounds_of(lines.down, settings.rounds), 0)
        self.lanes = lanes_of(method, plan, lines, window, self.context) if fixed_shapes(device) else 1
        self.state = LineState(plan, method, fixed, noise, prefix, lines, device)
        self.reach = 0  # rows above the first unfinished one whose laws are starts
        if method.needs_q:
            self._keep_laws(window, fixed)
        if forecast is not None:
            forecast.attach(self.state)

    def _keep_laws(self, window, fixed):
        lines, from_above = self.lines, self.start.from_law and self.start.source in ("above", "previous_frame")
        if from_above:
            self.reach = lines.rows if self.plan.frames > 1 else 1
        given = (fixed[:, self.plan.cells.numpy() >= 0] >= 0).any()
        whole = from_above or given or self.method.layout == "row-block"
        span = int(lines.size.max()) if whole else min(window + 1, int(lines.size.max()))
        under_way = -(-self.plan.cols // self.context) + 1
        self.state.keep_laws(min(len(lines), under_way + self.reach), span)

    # --- what a pass looks at ------------------------------------------------------------------------------------

    def limits(self, count):
        """Decided positions that each row may have, given those it has: int [A, L] -> int [A, L].

        A row never overtakes the row above, and is closed until that has enough columns.
        """
        size, above = self.lines.size, count[:, :-1]
        limit = np.broadcast_to(size, count.shape).copy()
        behind = np.where(above >= self.context, np.minimum(above, size[1:]), 0)
        limit[:, 1:] = np.where(above == size[:-1], size[1:], behind)
        return limit

    def windows(self, active):
        """(first, one past the last) position that each row looks at: int [A, L]; equal where it looks at none."""
        state, start, rows = self.state, self.lines.start, np.arange(active)[:, None]
        begin = start + state.count[:active]
        known = state.rank[rows, begin]
        last = state.rank[rows, start + self.limits(state.count[:active])]
        last = np.minimum(known + self.width, last)
        return begin, np.where(last > known, state.place[rows, last - 1] + 1, begin)

    def look(self, active):
        """`Look` of the next pass over the first `active` samples."""
        state, lines = self.state, self.lines
        begin, end = self.windows(active)
        used = end > begin
        top = np.where(used, end, 0).max(1)[:, None]
        unfed = ~state.fed[:active].all(0)
        low = min(int(unfed.argmax()), int(begin[used].min()))
        band = np.arange(low, int(top.max()))
        line = lines.line[band]
        asked = (band >= begin[:, line]) & (band < end[:, line])
        settled = state.settled[:active, band]
        opened = asked & ~settled & (lines.offset[band] == 0)
        # a row's end that the format or the user gives is known before the row is
        given = opened & (state.fixed[:active, band - 1] >= 0)
        if given.any():
            settled |= given
            state.settled[:active, band] = settled
        feed = (asked | (settled & ~state.fed[:active, band])) & (band < top)
        return self._lanes(feed, band, asked, settled, begin, end)

    def _lanes(self, feed, band, asked, settled, begin, end):
        """Arrange the inputs [A, band] as lanes."""
        state, lines, n = self.state, self.lines, self.plan.length
        rows, column = np.nonzero(feed)
        counts = feed.sum(1)
        lane = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        width = -(-counts.max() // self.lanes) * self.lanes

        def spread(values, fill):
            out = np.full((len(feed), width), fill)
            out[rows, lane] = values
            return out

        position, asked, settled = band[column], asked[rows, column], settled[rows, column]
        before, line = position - 1, lines.line[position]
        own = lines.line[before]  # the input's row; an input before position 0 is no draft whatever this says
        drafted = ~settled & (lines.offset[position] > 0)
        substitute = ~settled & ~drafted
        token = state.tokens[rows, np.maximum(before, 0)]
        token[substitute] = self._substitutes(rows[substitute], line[substitute])
        return Look(
            positions=spread(position, n - 1),
            asked=spread(asked, False),
            before=spread(before, n),
            line=spread(line, 0),
            head=spread(asked & (position == begin[rows, line]), False),
            token=spread(token, 0),
            drafted=spread(drafted, False),
            settled=spread(settled, False),
            floor=spread(np.where(drafted, begin[rows, own], before), 0),
        )

    def _substitutes(self, rows, line):
        """Stand-ins for the unknown last tokens of the rows above `line`: the last decided one of the row over them.

        As ZipAR does; the picture's first row has none over it and lends its own. Only the input itself sees it.
        """
        source = np.where(line >= 2, line - 2, 0)
        return self.state.tokens[rows, self.lines.start[source] + self.state.count[rows, source] - 1]

    def enter(self, look):
        """First drafts of positions that nobody looked at before.

        Returns:
            None, or (lanes, valid [A, M], columns on the device) when the drafts were drawn there.
        """
        state, lines = self.state, self.lines
        known = np.maximum(state.entered, state.count)[: len(look.asked)]
        samples = np.arange(len(known))[:, None]
        fresh = look.asked & (lines.offset[look.positions] >= known[samples, look.line])
        if not fresh.any():
            return None
        rows, lane = np.nonzero(fresh)
        counts = fresh.sum(1)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        valid = np.zeros((len(known), counts.max()), dtype=bool)
        lanes = np.zeros(valid.shape, dtype=np.int64)
        valid[rows, place], lanes[rows, place] = True, lane
        positions, line = look.positions[samples, lanes], look.line[samples, lanes]
        if state.laws is not None:
            self._fit_laws(look)
        known = known[samples, line]
        source = self._sources(positions, known) if state.forecast is None else state.forecast.sources(positions, known)
        if self.start.from_law:  # the law of a given token was never computed
            source = np.where((source >= 0) & (state.fixed[samples, source] < 0), source, -1)
        np.maximum.at(state.entered, (rows, look.line[rows, lane]), lines.offset[look.positions[rows, lane]] + 1)
        if state.forecast is not None:
            drawn = state.forecast.draft(positions, valid, source)
        else:
            drawn = state.draft(self.start, positions, valid, source)
        if drawn is None:
            return None
        return lanes, valid & (state.fixed[samples, positions] < 0), drawn[2]

    def _fit_laws(self, look):
        state, size = self.state, self.lines.size
        unfinished = (state.count[: len(look.asked)] < size).argmax(1)
        newest = np.where(look.asked, look.line, 0).max(1)
        held = len(size) - 1 - (state.entered[:, ::-1] > 0).argmax(1)
        state.laws.fit(int((newest - unfinished).max()) + 1 + self.reach, held)

    def _sources(self, positions, known):
        """Positions that first drafts follow, -1 where there are none.

        What has no cell above follows the previous frame, and the other way round.

        Args:
            known: int [A, M] positions of the row that had drafts before.
        """
        lines, source = self.lines, self.start.source
        if source is None:
            return np.full_like(positions, -1)
        if source == "left":
            return np.where(known > 0, lines.start[lines.line[positions]] + known - 1, -1)
        tables = (lines.above, lines.frame) if source == "above" else (lines.frame, lines.above)
        first, second = (table[positions] for table in tables)
        return np.where(first >= 0, first, second)

    # --- one pass ------------------------------------------------------------------------------------------------

    def step(self, run):
        """One pass of a `loop.Run`; returns what its samples' `LineFrontier.advance` takes."""
        state, active = self.state, len(run.active)
        state.settle_given(active, self.limits)
        self.now = look = self.look(active)
        drawn = self.enter(look)
        drafts = run.to_device(state.tokens[np.arange(active)[:, None], look.positions])
        if drawn is not None:
            lanes, valid, columns = drawn
            spare = drafts.new_zeros(active, 1)
            lanes = run.to_device(np.where(valid, lanes, drafts.shape[1]))
            drafts = torch.cat([drafts, spare], 1).scatter_(1, lanes, columns + state.base)[:, :-1]
        # a draft's input lane stands right of the lane that decides it
        inputs = torch.where(run.to_device(look.drafted), drafts.roll(1, 1), run.to_device(look.token))
        run.clock.lap("rest")
        logits = run.session.window(
            inputs,
            run.to_device(look.before),
            int(np.where(look.before < self.plan.length, look.before, -1).max()) + 1,
            bool((look.before < 0).any()),
            look.visible(state.settled[:active, 1:], run.to_device),
        )
        if state.forecast is not None:
            state.forecast.note(look, run.session.states)
        run.clock.lap("backbone")
        steps = run.decide(logits, drafts, look.positions, look.asked, None, None)
        run.clock.lap("kernel")
        return steps

    def commit(self, token, redraft, kept):
        """Commit in each row the drafts that stand and the first changed token; write all other drafts.

        A row that has had its rounds is committed whole. PJD as published commits a changed token in the uppermost
        unfinished row only.

        Args:
            token, redraft: int64 [A, I] columns. kept: [A, I] the draft stands.
        """
        state, look = self.state, self.now
        samples, n = np.arange(len(token))[:, None], self.plan.length
        given = state.fixed[samples, look.positions]
        stands = kept.astype(bool) | (given >= 0)
        rejected = look.asked & ~stands
        seen = np.cumsum(rejected, 1) - rejected
        whole = look.asked & (seen == np.maximum.accumulate(np.where(look.head, seen, 0), 1))  # no reject left of it
        done = whole
        if not self.method.every_row:
            upmost = (state.count[: len(token)] < self.lines.size).argmax(1)[:, None]
            done = whole & (stands | (look.line == upmost))
        if self.due.any():
            rows, lane = np.nonzero(look.head)
            state.turns[rows, look.line[rows, lane]] += 1
            due = self.due[look.positions]
            done = done | (look.asked & (due > 0) & (state.turns[samples, look.line] >= due))
        new = np.where(done, token, redraft) + state.base
        state.tokens[samples, np.where(look.asked, look.positions, n)] = np.where(given >= 0, given, new)
        self._settle(look, done, whole & stands)
        return self._steps(look.asked & (given < 0), done)

    def _settle(self, look, done, right):
        """Book what a pass decided: `done` positions; `right` [A, I]: those whose draft was right as it was fed."""
        state = self.state
        rows, lane = np.nonzero(done)
        np.add.at(state.count, (rows, look.line[rows, lane]), 1)
        state.settled[rows, look.positions[rows, lane] + 1] = True
        valid = look.settled.copy()
        valid[:, 1:] |= look.drafted[:, 1:] & right[:, :-1]
        rows, lane = np.nonzero(valid)
        state.fed[rows, look.positions[rows, lane]] = True

    def _steps(self, looked, done):
        """What each sample's `LineFrontier.advance` takes."""
        count, look = self.state.count[: len(looked)], self.now
        upmost = (count < self.lines.size).argmax(1)
        first = self.lines.start[upmost] + count[np.arange(len(count)), upmost]
        committed = (looked & done).sum(1).tolist()
        return [(p[mask], n, int(f)) for p, mask, n, f in zip(look.positions, looked, committed, first)]
