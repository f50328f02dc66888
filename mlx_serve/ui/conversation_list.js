// The list of conversations, with what can be done to all of them: keep, export, import.
import { asFile, fromFile, newestFirst, titleOf } from "./conversations.js";
import { $, button, element } from "./dom.js";

const NOTE = "Only this browser has them. The server keeps none.";
const OFF = "They are gone when this page is closed.";
const MAX_FILE_BYTES = 100 * 2 ** 20;

export class ConversationList {
  #current = "";

  // ``onOpen`` is given a conversation, ``onNew`` nothing.
  constructor(kept, { onOpen, onNew }) {
    this.kept = kept;
    this.onOpen = onOpen;
    this.onNew = onNew;
    $("new").addEventListener("click", onNew);
    $("keep").checked = kept.isKeeping;
    $("keep").disabled = !kept.canKeep;
    $("keep").addEventListener("change", async () => {
      await kept.keep($("keep").checked);
      this.#tell();
    });
    $("export").addEventListener("click", () => this.#export());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.#import());
    this.#tell();
  }

  show(current) {
    this.#current = current;
    $("conversations").replaceChildren(...newestFirst(this.kept.conversations.values()).map((one) => this.#entry(one)));
  }

  tell(text) {
    $("keep-note").textContent = text;
  }

  #tell() {
    if (!this.kept.canKeep) this.tell("This browser lets the page keep nothing.");
    else this.tell(this.kept.isKeeping ? NOTE : OFF);
  }

  #entry(conversation) {
    const entry = element("li");
    const title = titleOf(conversation);
    const open = button(title, () => this.onOpen(conversation), "title");
    if (conversation.id === this.#current) open.setAttribute("aria-current", "true");
    const remove = button("Delete", () => this.#remove(conversation, remove));
    remove.setAttribute("aria-label", `Delete ${title}`);
    entry.append(open, remove);
    return entry;
  }

  // The second press does it: there is no way back.
  #remove(conversation, pressed) {
    if (pressed.textContent === "Delete") {
      pressed.textContent = "Really?";
      pressed.addEventListener("blur", () => { pressed.textContent = "Delete"; }, { once: true });
      return;
    }
    this.kept.remove(conversation.id);
    if (conversation.id === this.#current) this.onNew();
    else this.show(this.#current);
  }

  #export() {
    const text = asFile(newestFirst(this.kept.conversations.values()));
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = "mlx-serve-conversations.json";
    link.click();
    URL.revokeObjectURL(link.href);
  }

  async #import() {
    const [file] = $("import-file").files;
    $("import-file").value = "";
    if (!file) return;
    try {
      if (file.size > MAX_FILE_BYTES) throw new SyntaxError("it is larger than 100 MiB");
      const found = fromFile(await file.text());
      for (const conversation of found) await this.kept.save(conversation);
      this.tell(`${found.length} imported.`);
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
      this.tell(`Not imported: ${error.message}`);
    }
    this.show(this.#current);
  }
}
