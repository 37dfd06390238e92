// The types of the dashboard: what the server answers, and what the modules pass to each other. Only `tsc` reads this
// file; the dashboard itself is plain JavaScript.

interface Counts { allowed: number; refused: number; would_refuse: number; skipped: number; fallback: number; starved: number; remaining: number[] }
interface ServerEvent {
  t: number; version: number; source: string; shadowed: boolean; error: string | null;
  requests: { allowed: number; refused: number; degraded: number };
  limits: Map<string, Counts>;
  store: { state: string; p99_ms: number | null };
  keys: number; max_keys: number;
  upstream?: { url: string; in_flight: number; limit: number; floor_ms: number | null; waiting: number; shed: number; errors: number; addresses: { address: string; in_flight: number; errors: number; ejected: boolean }[] };
}
interface Limit {
  name: string; by: string[]; rate?: string; burst?: number; limit?: number; mode: string; algorithm: string;
  tier?: string; when?: object; unless?: object; cost?: string;
}
interface Limits { version: number; source: string; error: string | null; shadowed: boolean; persistent?: boolean; limits: Limit[] }
interface TopKey { limit: string; key: (string | null)[]; count: number; error: number; ref: string | null }
interface TopKeys { since: number; busiest: TopKey[]; refused: TopKey[]; would_refuse: TopKey[] }
/** Counts per step, oldest first; `null` before the start. */
type Row = (number | null)[];
/** The counts of each kind. */
type Rows = Row[];
interface Past { step: number; until: number; requests: Rows; limits: Map<string, Rows> }
/** An answer of the server; the shape of `data` depends on the call. */
interface Answer { status: number; data: any; message: string }

interface View { title: string; element: Node; update?: () => void; tick?: () => void }
interface Series { name: string; kind: string; counts: Row }
interface ChartData { step: number; until: number; series: Series[] }

type Child = Node | string | number | null | undefined | false;
type Attributes = Record<string, unknown>;
