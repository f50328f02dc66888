// The few things that every part of the page needs of the document. Text is only ever set as text: nothing here takes markup.

export const $ = (id) => document.getElementById(id);

export function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function button(label, onClick, className) {
  const made = element("button", className, label);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

// A button that copies what ``text()`` gives, and says for a moment that it did.
export function copyButton(text, label = "Copy") {
  const made = button(label, async () => {
    made.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => { made.textContent = label; }, 2000);
  });
  return made;
}

// Whether it worked. Only a page from this machine or over HTTPS has a clipboard; others use the older command.
export async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch (error) {
      if (error.name !== "NotAllowedError") throw error;
    }
  }
  const box = element("textarea");
  box.value = text;
  const focused = document.activeElement;
  // An open dialog makes the rest of the page inert.
  (document.querySelector("dialog[open]") || document.body).append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  focused?.focus();
  return done;
}
