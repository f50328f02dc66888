// The API key: asked for when the server wants one, and kept for this tab alone.
import { $ } from "./dom.js";

const KEY = "mlx-serve-key";
let asking = null;
let onKey = () => {};

export const key = () => sessionStorage.getItem(KEY) || "";
export const forgetKey = () => sessionStorage.removeItem(KEY);

// One dialog for all that wait; whether there is a key now.
export function askForKey(wasWrong) {
  asking ||= new Promise((resolve) => {
    $("key-text").textContent = wasWrong
      ? "The server did not take this key."
      : "This server asks for a key. It is kept for this tab alone, until the tab is closed.";
    $("key").value = "";
    const dialog = $("key-dialog");
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      asking = null;
      const given = $("key").value.trim();
      const isUsed = dialog.returnValue === "use" && given !== "";
      if (isUsed) sessionStorage.setItem(KEY, given);
      $("key").value = "";
      resolve(isUsed);
      if (isUsed) onKey();
    }, { once: true });
  });
  return asking;
}

// ``listener`` is called each time that a key was given.
export function setUpKey(listener) {
  onKey = listener;
  $("key-button").addEventListener("click", () => askForKey(false));
  $("key-cancel").addEventListener("click", () => $("key-dialog").close("cancel"));
  $("key-forget").addEventListener("click", () => {
    forgetKey();
    $("key-dialog").close("forget");
  });
}
