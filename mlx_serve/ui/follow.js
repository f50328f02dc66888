// Keeps the end of a scrolled box in view while it grows, until the reader scrolls up; again when they are at the end.

const NEAR_PX = 40;

export class Follow {
  isFollowing = true;
  #box;
  #onChange;
  #top = 0;
  // What comes into view may turn out to be higher than the browser took it to be, also when nothing was added.
  #sizes = new ResizeObserver(() => this.grew());
  #last = null;

  constructor(box, onChange) {
    this.#box = box;
    this.#onChange = onChange;
    box.addEventListener("scroll", () => this.#scrolled(), { passive: true });
  }

  // Something was added, or is higher than it was.
  grew() {
    if (!this.isFollowing) return;
    this.#box.scrollTop = this.#box.scrollHeight;
    this.#top = this.#box.scrollTop;
    const last = this.#box.lastElementChild;
    if (last === this.#last) return;
    this.#last = last;
    this.#sizes.disconnect();
    if (last) this.#sizes.observe(last);
  }

  toEnd() {
    this.#set(true);
    this.grew();
  }

  // The box grows between a scroll and its event, so only a way up means that the reader has left the end: any way up, since
  // the first steps of a smooth scroll are short. A box that shrinks goes up too, and is at its end.
  #scrolled() {
    const { scrollTop } = this.#box;
    const toEnd = this.#toEnd();
    if (scrollTop < this.#top && toEnd > 1) this.#set(false);
    else if (toEnd < NEAR_PX) this.#set(true);
    this.#top = scrollTop;
  }

  #toEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.#box;
    return scrollHeight - scrollTop - clientHeight;
  }

  #set(isFollowing) {
    if (this.isFollowing === isFollowing) return;
    this.isFollowing = isFollowing;
    this.#onChange(isFollowing);
  }
}
