// Phases of the last seconds: after the first answer only what is new is asked for.

import { ask } from "./api.js";

const OVERLAP_S = 5;

export class Timeline {
  // `only` narrows it down to a job or a node: "job=NAME" or "node=NAME".
  constructor(windowS, only = "") {
    this.windowS = windowS;
    this.only = only;
    this.phases = new Map();
    this.now = 0;
    this.askedAt = null;
  }

  async update() {
    const since = this.askedAt === null ? Infinity : (performance.now() - this.askedAt) / 1000;
    const windowS = Math.min(since + OVERLAP_S, this.windowS);
    const askedAt = performance.now();
    const found = await ask(`/v1/timeline?window_s=${windowS}${this.only && `&${this.only}`}`);
    this.askedAt = askedAt;
    this.now = found.now;
    for (const phase of found.phases) this.phases.set(phase.token, phase);
    for (const [token, phase] of this.phases) {
      if (phase.end !== null && phase.end < found.now - this.windowS) this.phases.delete(token);
    }
  }
}
