// Greedy translation by transformers.js with a model that `vaswani export --format transformers.js` wrote.
//
//     npm install @huggingface/transformers@4
//     node translate_transformers_js.mjs FOLDER [fp32|q8] < source.en > translated.de
//
// On a page the same does it, with `env.allowLocalModels = true` and the address of FOLDER's parent.
import { createInterface } from "node:readline";
import { dirname, resolve } from "node:path";
import { env, pipeline } from "@huggingface/transformers";

const folder = resolve(process.argv[2]);
env.allowRemoteModels = false; // the folder's files alone
env.localModelPath = dirname(folder);
const translate = await pipeline("translation", folder.split(/[\\/]/).at(-1), { dtype: process.argv[3] ?? "fp32" });
const max_new_tokens = Math.min(256, translate.model.config.max_position_embeddings); // 256 is the pipeline's own
for await (const line of createInterface({ input: process.stdin })) {
    const [{ translation_text: text }] = line.trim() ? await translate(line, { max_new_tokens }) : [{ translation_text: "" }];
    console.log(text.replaceAll("\n", " "));
}
