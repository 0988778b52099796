// Requests that arrive at random, as those of many users do, however fast the server answers (an
// open loop). README.md explains the variables.
import { check, sleep } from 'k6';
import { SharedArray } from 'k6/data';
import exec from 'k6/execution';
import http from 'k6/http';

const url = __ENV.URL || 'http://127.0.0.1:8000/translate';
const rate = Number(__ENV.RATE || 20);
const seconds = Number(__ENV.SECONDS || 60);
const size = Number(__ENV.SIZE || 1);
const most = Number(__ENV.CLIENTS || 1000);
const field = __ENV.FIELD || 'q';
const body = JSON.parse(__ENV.BODY || '{}');

let told = false; // whether this user has said why a request failed
const headers = { 'Content-Type': 'application/json' };
if (__ENV.LIGHTSEQ_API_KEY) headers.Authorization = `Bearer ${__ENV.LIGHTSEQ_API_KEY}`;

if (!__ENV.TEXTS) throw new Error('set a file with a text in each line: -e TEXTS=test.de');
// k6 opens files from the folder of this script.
const path = __ENV.TEXTS.startsWith('/') ? __ENV.TEXTS : `${__ENV.PWD}/${__ENV.TEXTS}`;
const texts = new SharedArray('texts', () =>
  open(path)
    .split('\n')
    .filter((line) => line.trim() !== ''),
);

const atRandom = {
  executor: 'constant-arrival-rate',
  rate: Math.round(1000 * rate),
  timeUnit: '1000s',
  duration: `${seconds}s`,
  preAllocatedVUs: Math.min(Math.ceil(2 * rate) + 10, most),
  maxVUs: most,
};
const inTurns = { executor: 'constant-vus', vus: most, duration: `${seconds}s` };

export const options = {
  discardResponseBodies: true,
  scenarios: { users: rate > 0 ? atRandom : inTurns },
  summaryTrendStats: ['med', 'p(95)', 'p(99)', 'max'],
};

export default function () {
  // Moved by a random time each, regular arrivals become those of a Poisson process.
  if (rate > 0) sleep(Math.random());
  const first = exec.scenario.iterationInTest * size;
  const some = Array.from({ length: size }, (_, n) => texts[(first + n) % texts.length]);
  const sent = JSON.stringify({ ...body, [field]: size > 1 ? some : some[0] });
  const answer = http.post(url, sent, { headers });
  const says = { answered: (it) => it.status === 200 };
  if (!check(answer, says) && !told) {
    console.error(`not answered: ${answer.status || answer.error}`);
    told = true;
  }
}

export function handleSummary(data) {
  const of = (name) => (data.metrics[name] || { values: {} }).values;
  const times = of('http_req_duration');
  const lost = (of('dropped_iterations').count || 0) + (of('checks').fails || 0);
  const row = {
    requests: of('http_reqs').count,
    texts_per_second: (of('checks').passes || 0) * size / seconds,
    first_byte_ms: of('http_req_waiting').med,
    p50_ms: times.med,
    p95_ms: times['p(95)'],
    p99_ms: times['p(99)'],
    longest_ms: times.max,
    not_answered: lost,
  };
  return { stdout: `${JSON.stringify(row)}\n` };
}
