// A WebSocket client: messages of all sizes come back as they were sent.
import { WebSocket } from "ws";

const socket = new WebSocket(process.argv[2]);
const sizes = [0, 1, 125, 126, 65_535, 65_536, 1_000_000];
let received = 0;
socket.on("open", () => sizes.forEach((size) => socket.send(Buffer.alloc(size, 7))));
socket.on("message", (data, binary) => {
  if (!binary || data.length !== sizes[received] || !data.every((byte) => byte === 7)) process.exit(1);
  received += 1;
  if (received === sizes.length) socket.close(1000);
});
socket.on("close", (code) => { console.log(`${received} messages, closed with ${code}`); });
socket.on("unexpected-response", (request, response) => { console.log(`refused with ${response.statusCode}`); process.exit(); });
