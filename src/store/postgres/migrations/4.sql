-- `ticket_secret` has what all nodes sign tickets for events with.

CREATE TABLE ticket_secret (id bigint PRIMARY KEY, secret bytea NOT NULL);
INSERT INTO ticket_secret (id, secret)
    VALUES (1, sha256(convert_to(gen_random_uuid()::text || gen_random_uuid()::text, 'UTF8')));
