//! Idempotency keys in the store.

use axed::domain::run::{Scope, now};
use axed::store::{Change, ClaimedRun, IdempotencyKey, RequestClaim, StoreError};

use crate::store::fixtures::{
    Opened, claim, claiming, count, in_an_hour, listed, opening, page, root, sql, sqlite, write,
};

/// Of fifty identical simultaneous requests one creates a run, and the others get that run's id.
async fn a_key_accepts_one_run(opened: &Opened) {
    let store = &*opened.store;
    let scopes: Vec<_> = (0..50).map(|_| root()).collect();
    let results = futures_util::future::join_all(scopes.iter().enumerate().map(|(n, scope)| {
        let claim = claim("k", n as u8, in_an_hour());
        store.write(claiming(scope, claim))
    }))
    .await;
    let won: Vec<_> = (0..50).filter(|n| results[*n].is_ok()).collect();
    let [won] = won[..] else { panic!("{won:?}") };
    let wanted = ClaimedRun {
        run: scopes[won].run,
        body_hash: [won as u8; 32],
        number: None,
    };
    for (n, result) in results.iter().enumerate() {
        let refused = matches!(result, Err(StoreError::AlreadyClaimed(by)) if *by == wanted);
        assert_eq!(refused, n != won, "{result:?}");
    }
    assert_eq!(listed(store, page()).await, [wanted.run]);
    let key = |key: &str| store.claimed_run(claim(key, 0, in_an_hour()).key);
    assert_eq!(key("k").await.expect("a read"), Some(wanted));
    assert_eq!(key("other").await.expect("a read"), None);

    // The refused run never was: neither broken, nor in the way of its own id, nor with a log.
    let refused = &scopes[(won + 1) % 50];
    let again = claiming(refused, claim("k", 0, in_an_hour()));
    store.enqueue(again).await.expect("posted");
    let late = store.write(write(refused, Change::Unchanged, 1)).await;
    assert!(matches!(late, Err(StoreError::RunNotFound(_))), "{late:?}");
    let open = claiming(refused, claim("other", 7, in_an_hour()));
    assert_eq!(store.write(open).await.expect("opened"), 1);

    // Every part of a key distinguishes it.
    for change in [
        |key: &mut IdempotencyKey| key.credential.push('x'),
        |key: &mut IdempotencyKey| key.route.push('x'),
        |key: &mut IdempotencyKey| key.key.push('x'),
    ] {
        let mut other = claim("k", 0, in_an_hour());
        change(&mut other.key);
        store.write(claiming(&root(), other)).await.expect("opened");
    }
    assert!(store.delete(wanted.run).await.expect("deleted"));
    assert_eq!(key("k").await.expect("a read"), None);
    let anew = claiming(&root(), claim("k", 1, in_an_hour()));
    store.write(anew).await.expect("opened");
}

/// A key that has expired accepts once more.
async fn a_key_expires(opened: &Opened) {
    let store = &*opened.store;
    for n in 0..20 {
        let old = claim(&n.to_string(), n, now());
        store.write(claiming(&root(), old)).await.expect("opened");
    }
    let expired = claim("7", 1, in_an_hour());
    let found = store.claimed_run(expired.key.clone()).await;
    assert_eq!(found.expect("a read"), None);
    let (first, second) = (root(), root());
    let open = claiming(&first, expired.clone());
    store.write(open).await.expect("opened");
    let refused = store.write(claiming(&second, expired)).await;
    assert!(matches!(refused, Err(StoreError::AlreadyClaimed(by)) if by.run == first.run));
    assert_eq!(listed(store, page()).await.len(), 21);
}

/// A request that continues a run has its key committed with what it brings, or brings nothing.
async fn a_key_continues_a_run_once(opened: &Opened) {
    let store = &*opened.store;
    let (first, second) = (root(), root());
    for scope in [&first, &second] {
        store.write(opening(scope, "writer")).await.expect("opened");
    }
    let continuing = |scope: &Scope, turn: u32| {
        let request = RequestClaim {
            claim: claim("k", 1, in_an_hour()),
            number: turn,
        };
        write(scope, Change::Claim(Box::new(request)), 1)
    };
    assert_eq!(store.write(continuing(&first, 3)).await.expect("added"), 2);
    let wanted = ClaimedRun {
        run: first.run,
        body_hash: [1; 32],
        number: Some(3),
    };
    for scope in [&first, &second] {
        let refused = store.write(continuing(scope, 4)).await;
        assert!(matches!(refused, Err(StoreError::AlreadyClaimed(by)) if by == wanted));
    }
    let found = store.claimed_run(claim("k", 1, in_an_hour()).key).await;
    assert_eq!(found.expect("a read"), Some(wanted));
    for (scope, last) in [(&first, 3), (&second, 2)] {
        let next = store.write(write(scope, Change::Unchanged, 1)).await;
        assert_eq!(next.expect("added"), last, "a refused request has no event");
    }
}

shared_stories!(
    a_key_accepts_one_run,
    a_key_expires,
    a_key_continues_a_run_once,
);

/// Expired keys go as new ones come, and a deleted run takes its keys along.
#[tokio::test]
async fn expired_keys_are_removed() {
    let opened = sqlite();
    let (store, dir) = (&*opened.store, opened.place.path());
    let kept = root();
    let open = claiming(&kept, claim("kept", 0, in_an_hour()));
    store.write(open).await.expect("opened");
    sql(
        dir,
        "WITH RECURSIVE n (n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < 20) \
         INSERT INTO claims (credential, route, key, run, body, expires) \
         SELECT '', '', n, zeroblob(16), zeroblob(32), 1000 FROM n",
    );
    for (n, left) in (0..7).zip([18, 15, 12, 9, 6, 7, 8]) {
        let new = claim(&n.to_string(), 0, in_an_hour());
        store.write(claiming(&root(), new)).await.expect("opened");
        assert_eq!(count(dir, "claims"), left, "after {n}");
    }
    assert!(store.delete(kept.run).await.expect("deleted"));
    assert_eq!(count(dir, "claims"), 7);
}
