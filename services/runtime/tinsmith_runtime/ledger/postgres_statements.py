"""The hot statements of the ledger on PostgreSQL: one for a whole batch, each atomic by itself.

Arguments are columns, one array each. Every statement locks the lease rows that it depends on
(`FOR SHARE`) before it writes. A process that raises an epoch waits for it, and under READ
COMMITTED a statement that had to wait looks at the row again. A bare comparison would let a process
write that lost its run while the statement waited. Since there is no transaction around it, a
process that is stopped in the middle holds no lock.

All of them can be repeated; see `tinsmith_runtime.sql.repeatable_statements`.
"""

from __future__ import annotations

SUBMIT = """
WITH input AS (
  SELECT * FROM unnest(
    $1::text[], $2::bigint[], $3::bigint[], $4::text[], $5::text[],
    $6::bytea[], $7::bytea[], $8::text[], $9::float8[], $10::bigint[], $11::text[]
  ) WITH ORDINALITY AS i(
    run, epoch, sequence_number, kind, request_id,
    digest, payload, payload_path, submit_time_s, seen_through, key_id, position
  )
), held AS (
  SELECT l.run, l.epoch, l.expired_through
  FROM leases l JOIN (SELECT DISTINCT run, epoch FROM input) w USING (run, epoch)
  FOR SHARE OF l
), inserted AS (
  INSERT INTO operations (
    run, sequence_number, kind, request_id, digest, payload, payload_path,
    state, num_attempts, submit_time_s, revision, seen_through, key_id
  )
  SELECT
    run, sequence_number, kind, request_id, digest, payload, payload_path,
    'pending', 0, submit_time_s, 0, seen_through, key_id
  FROM input JOIN held USING (run, epoch)
  WHERE sequence_number > expired_through
  ORDER BY position
  ON CONFLICT DO NOTHING
  RETURNING run, sequence_number, request_id, digest
)
SELECT
  h.run IS NOT NULL AS is_held,
  n.run IS NOT NULL AS is_inserted
FROM input i
LEFT JOIN held h USING (run, epoch)
LEFT JOIN inserted n
  ON (n.run, n.sequence_number, n.request_id, n.digest)
   = (i.run, i.sequence_number, i.request_id, i.digest)
ORDER BY i.position
"""

START = """
WITH input AS (
  SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::int[])
    AS i(run, epoch, sequence_number, num_attempts)
), held AS (
  SELECT l.run, l.epoch
  FROM leases l JOIN (SELECT DISTINCT run, epoch FROM input) w USING (run, epoch)
  FOR SHARE OF l
)
UPDATE operations o
SET num_attempts = greatest(o.num_attempts, i.num_attempts)
FROM input i JOIN held h USING (run, epoch)
WHERE o.run = i.run AND o.sequence_number = i.sequence_number
"""

FINISH = """
WITH input AS (
  SELECT * FROM unnest(
    $1::text[], $2::bigint[], $3::bigint[], $4::text[], $5::bytea[], $6::bytea[],
    $7::text[], $8::float8[], $9::bigint[], $10::bigint[],
    $11::bigint[], $12::bigint[], $13::float8[]
  ) WITH ORDINALITY AS i(
    run, epoch, sequence_number, state, result, error,
    plan, finish_time_s, version, place,
    num_trained_tokens, num_prefilled_tokens, engine_s, position
  )
), wanted AS (
  SELECT run, epoch, count(*) AS num_operations, max(version) AS version
  FROM input GROUP BY run, epoch
), held AS (
  SELECT w.* FROM wanted w JOIN leases l USING (run, epoch) FOR SHARE OF l
), complete AS (
  SELECT h.* FROM held h
  WHERE h.num_operations = (
    SELECT count(*)
    FROM input i JOIN operations o USING (run, sequence_number)
    WHERE i.run = h.run AND o.state = 'pending'
  )
), advanced AS (
  UPDATE runs r
  SET version = c.version, last_revision = r.last_revision + c.num_operations
  FROM complete c WHERE r.name = c.run
  RETURNING r.name AS run, r.last_revision - c.num_operations AS revision
), finished AS (
  UPDATE operations o
  SET state = i.state, result = i.result, error = i.error, plan = i.plan,
      finish_time_s = i.finish_time_s, revision = a.revision + i.place
  FROM input i JOIN advanced a USING (run)
  WHERE o.run = i.run AND o.sequence_number = i.sequence_number AND o.state = 'pending'
  RETURNING o.run, o.sequence_number, o.kind, o.request_id, o.digest, o.num_attempts,
            o.submit_time_s, o.revision, o.key_id
), charged AS (
  INSERT INTO usage_totals AS u (
    run, key_id, day, num_trained_tokens, num_prefilled_tokens, engine_s, is_reported
  )
  SELECT f.run, f.key_id, floor(i.finish_time_s / 86400)::bigint,
         sum(i.num_trained_tokens), sum(i.num_prefilled_tokens), sum(i.engine_s), false
  FROM finished f JOIN input i USING (run, sequence_number)
  WHERE i.num_trained_tokens + i.num_prefilled_tokens > 0 OR i.engine_s > 0
  GROUP BY 1, 2, 3
  ON CONFLICT (run, key_id, day) DO UPDATE SET
    num_trained_tokens = u.num_trained_tokens + excluded.num_trained_tokens,
    num_prefilled_tokens = u.num_prefilled_tokens + excluded.num_prefilled_tokens,
    engine_s = u.engine_s + excluded.engine_s,
    is_reported = false
)
SELECT h.run IS NOT NULL AS is_held, f.*
FROM input i
LEFT JOIN held h USING (run, epoch)
LEFT JOIN finished f
  ON f.run = i.run AND f.sequence_number = i.sequence_number
ORDER BY i.position
"""
