// The columns beside the chat: folded by a button, over the chat where there is no room beside it.
import { $ } from "./dom.js";

const WIDE = "(min-width: 60rem)";

// ``isOpen``: what was chosen before, or undefined. ``onChoice`` is given what the person chooses on a wide screen.
export function setUpPanel(name, isOpen, onChoice) {
  const panel = $(name);
  const opener = $(`${name}-button`);
  const wide = matchMedia(WIDE);
  const set = (isShown) => {
    panel.hidden = !isShown;
    opener.setAttribute("aria-expanded", String(isShown));
  };
  const close = () => {
    if (panel.hidden || wide.matches) return;
    set(false);
    opener.focus();
  };
  set(wide.matches && isOpen !== false);
  wide.addEventListener("change", () => set(wide.matches && isOpen !== false));
  opener.addEventListener("click", () => {
    set(panel.hidden);
    if (wide.matches) onChoice(!panel.hidden);
  });
  panel.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  return { close };
}
