"""One of the two networks of a run, target or draft: passes over the canvas, and chains of denoising steps."""

from dataclasses import dataclass

import numpy as np
import torch

from .diffusion import Step

CONTEXTS = 64  # sequences that go through the network at once
STATES = 8192  # noisy tokens that go through the head at once


@dataclass
class Cells:
    """Cells to be drawn, one a row; all arrays int64 [R].

    Attributes:
        rows: row of the batch. cells: place in the raster. contexts: which of a pass's sequences is their condition.
        steps: step of the schedule that draws them.
    """

    rows: np.ndarray
    cells: np.ndarray
    contexts: np.ndarray
    steps: np.ndarray

    def __len__(self):
        return len(self.rows)

    def pick(self, which):
        return Cells(self.rows[which], self.cells[which], self.contexts[which], self.steps[which])


@dataclass
class Path:
    """What a chain of denoising steps made of some cells.

    Attributes:
        x: fp32 [R, C] the tokens. last: `Step` that x came from. log_sigma: fp64 [R] on the host, the sum over all
            steps and channels. states, laws: of every step, first to last, where asked for.
    """

    x: torch.Tensor
    last: Step
    log_sigma: torch.Tensor
    states: list
    laws: list


class Side:
    """A network with the classes of a batch.

    Args:
        net: `Mar`. classes: int64 [B], -1 for none. guided: run the unconditional twin too.
        diffusion: `Diffusion` on the network's device. guidance: fp32 [steps] of each step of the schedule.
        temperature: of the noise in a chain. lap: called with the part of the work that has just been done.
        poll: called before every network evaluation; what it raises ends the run.

    Attributes:
        passes: evaluations of the network over a canvas.
    """

    last_noise = False  # the last denoising step of a MAR adds none

    def __init__(self, net, classes, guided, diffusion, guidance, temperature, lap, poll, device):
        self.net, self.diffusion, self.temperature = net, diffusion, temperature
        self.lap, self.poll, self.device = lap, poll, device
        self.guidance = guidance.to(device) if guided else None
        self.passes = 0
        classes = classes.to(device)
        given = [classes, torch.full_like(classes, -1)] if guided else [classes]
        self.conditions = torch.stack([net.conditions(each) for each in given])  # [streams, B, dim]

    def look(self, tokens, known, rows, part):
        """One pass over some canvases.

        Args:
            tokens: fp32 [M, n, C]. known: bool [M, n]. rows: int64 [M], rows of the batch. part: for the clock.

        Returns:
            Conditions of all cells, [streams, M, n, D].
        """
        streams, m = len(self.conditions), len(tokens)
        tokens, known = (t.to(self.device).repeat(streams, *[1] * (t.ndim - 1)) for t in (tokens, known))
        conditions = self.conditions[:, torch.from_numpy(rows).to(self.device)].flatten(0, 1)
        parts = []
        for first in range(0, len(tokens), CONTEXTS):
            self.poll()
            some = slice(first, first + CONTEXTS)
            parts.append(self.net(tokens[some], known[some], conditions[some]))
        self.passes += 1
        self.lap(part)
        return torch.cat(parts).unflatten(0, (streams, m))

    def gather(self, z, cells):
        """Conditions of some cells, [streams * R, D]: conditional rows first."""
        contexts, places = (torch.from_numpy(a).to(z.device) for a in (cells.contexts, cells.cells))
        return z[:, contexts, places].flatten(0, 1)

    def law(self, x, index, cond, steps):
        """Law of one denoising step.

        Args:
            x: fp32 [R, C]. index: int, or int64 [R] on the device. cond: [streams * R, D]. steps: int64 array [R].

        Returns:
            `Step`.
        """
        self.poll()
        times = self.diffusion.times[index]
        times = times.expand(len(x)) if times.ndim == 0 else times
        scale = None if self.guidance is None else self.guidance[torch.from_numpy(steps).to(self.device)][:, None]
        eps, spread = self.net.noise(x, times, cond, scale)
        return self.diffusion.step(x, index, eps, spread, self.temperature)

    def chain(self, cond, cells, noise, keep=False):
        """Denoise some cells from pure noise.

        Args:
            cond: [streams * R, D]. cells: `Cells`. noise: fp32 [count + 1, R, C]: the noise of steps 0 .. count - 1,
                then the start. keep: note all states and laws.

        Returns:
            `Path`.
        """
        count, noise = self.diffusion.count, noise.to(self.device)
        x, sums, states, laws = noise[count], [], [], []
        for index in reversed(range(count)):
            law = self.law(x, index, cond, cells.steps)
            if keep:
                states.append(x)
                laws.append(law)
            x = law.draw(noise[index] if index or self.last_noise else None)
            sums.append(law.log_sigma.sum(-1))
        total = torch.stack(sums).cpu().double().sum(0)
        self.lap("head")
        return Path(x, law, total, states, laws)

    def laws_along(self, cond, cells, states):
        """Laws of all steps but the last at given states, evaluated side by side.

        Args:
            cond, cells: as in `chain`. states: list of count tensors [R, C], first step to last.

        Returns:
            list of `Step`, one a state.
        """
        count, r = self.diffusion.count, len(cells)
        x = torch.cat(states)
        index = torch.arange(count - 1, -1, -1, device=self.device).repeat_interleave(r)
        at, streams = torch.arange(r, device=self.device).repeat(count), len(cond) // r
        means, sigmas = [], []
        for first in range(0, len(x), STATES):
            some = slice(first, first + STATES)
            picked = torch.cat([at[some] + stream * r for stream in range(streams)])
            law = self.law(x[some], index[some], cond[picked], cells.steps[at[some].cpu().numpy()])
            means.append(law.mean)
            sigmas.append(law.log_sigma)
        self.lap("head")
        return [Step(mean, sigma) for mean, sigma in zip(torch.cat(means).split(r), torch.cat(sigmas).split(r))]

    def finish(self, x, cond, cells, noise, index):
        """Go on denoising from the states x [R, C] that step `index` left (0: nothing to do), row by row.

        Args:
            index: int64 [R]: the step that was done last, of each row.

        Returns:
            fp32 [R, C].
        """
        x, noise, streams = x.clone(), noise.to(self.device), len(cond) // len(cells)
        for step in reversed(range(int(index.max(initial=0)))):
            live = np.flatnonzero(index > step)
            rows = torch.from_numpy(live).to(self.device)
            picked = torch.cat([rows + stream * len(cells) for stream in range(streams)])
            law = self.law(x[rows], step, cond[picked], cells.steps[live])
            x[rows] = law.draw(noise[step][rows] if step or self.last_noise else None)
        self.lap("head")
        return x
