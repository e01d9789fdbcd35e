// Answers to recent questions, so that the way back from a zoom asks nobody again.

/** Keeps the answers used last, up to a number of bytes; an answer that failed is asked for again. */
export class Recent<Answer> {
  readonly #kept = new Map<string, { readonly answer: Promise<Answer>; bytes: number }>();
  #bytes = 0;

  constructor(
    private readonly budget: number,
    private readonly size: (answer: Answer) => number,
  ) {}

  /** Returns the answer kept under a key, or asks for it; two who ask at once share one answer. */
  get(key: string, ask: () => Promise<Answer>): Promise<Answer> {
    const known = this.#kept.get(key);
    if (known !== undefined) {
      this.#kept.delete(key);
      this.#kept.set(key, known);
      return known.answer;
    }
    const entry = { answer: ask(), bytes: 0 };
    this.#kept.set(key, entry);
    entry.answer.then(
      (answer) => {
        if (this.#kept.get(key) !== entry) return;
        entry.bytes = this.size(answer);
        this.#bytes += entry.bytes;
        this.#shrink();
      },
      () => {
        if (this.#kept.get(key) === entry) this.#kept.delete(key);
      },
    );
    return entry.answer;
  }

  /** What was answered may have changed. */
  forget(): void {
    this.#kept.clear();
    this.#bytes = 0;
  }

  #shrink(): void {
    for (const [key, { bytes }] of this.#kept) {
      if (this.#bytes <= this.budget) return;
      this.#kept.delete(key);
      this.#bytes -= bytes;
    }
  }
}
