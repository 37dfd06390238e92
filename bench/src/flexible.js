// Prints the checks per second of one process with rate-limiter-flexible on Redis.
//
//     node flexible.js SOCKET SECONDS IN_FLIGHT KEYS PIPELINE
const Redis = require('ioredis');
const { RateLimiterRedis } = require('rate-limiter-flexible');

const [socket, seconds, inFlight, keys, pipeline] = process.argv.slice(2);
const storeClient = new Redis({ path: socket, enableAutoPipelining: pipeline === 'true' });
const limiter = new RateLimiterRedis({ storeClient, points: 1000000, duration: 60 });

let checks = 0;
async function run(end, task) {
  for (let turn = task; Date.now() < end; turn += Number(inFlight)) {
    await limiter.consume(String(turn % keys).padStart(24, '0'));
    checks += 1;
  }
}

async function main() {
  const all = (end) => Promise.all(Array.from({ length: Number(inFlight) }, (_, task) => run(end, task)));
  // Warm-up, until the JIT has compiled the loop.
  await all(Date.now() + 300);
  checks = 0;
  const began = process.hrtime.bigint();
  await all(Date.now() + seconds * 1000);
  const took = Number(process.hrtime.bigint() - began) / 1e9;
  console.log(checks / took);
  storeClient.disconnect();
}

main();
