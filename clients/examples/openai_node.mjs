// The official `openai` client for Node: npm install in this folder.
import OpenAI from "openai";

const url = process.env.SPD_BASE_URL ?? "http://127.0.0.1:8000";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.SPD_API_KEY ?? "none" });
const model = (await client.models.list()).data[0].id;
const asked = {
  model,
  messages: [{ role: "user", content: "What is the capital of France?" }],
  temperature: 0,
  max_tokens: 32,
};

const answer = await client.chat.completions.create(asked);
console.log(answer.choices[0].message.content);

for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  process.stdout.write(chunk.choices[0].delta.content ?? "");
}
console.log();
