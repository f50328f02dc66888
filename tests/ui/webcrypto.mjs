// Node 18 has it under another name than browsers and newer versions.
import { webcrypto } from "node:crypto";

globalThis.crypto ??= webcrypto;
