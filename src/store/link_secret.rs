//! What links and tickets are signed with: so nothing is stored of a single one, and every node accepts them.

use futures_util::future::BoxFuture;
use secrecy::SecretBox;

use crate::store::StoreError;
use crate::store::changes::Changes;
use crate::store::engine::Engine;
use crate::store::reader::ReadMode;
use crate::store::sql::row::damaged;
use crate::store::sql::value::values;

pub type LinkSecret = SecretBox<[u8; 32]>;

pub trait LinkSecrets: Send + Sync + 'static {
    /// The secret of the database, which is made when it is first needed and never changes.
    fn link_secret(&self) -> BoxFuture<'_, Result<LinkSecret, StoreError>>;
}

const SECRET: &str = "SELECT secret FROM link_secret";
const INSERT: &str =
    "INSERT INTO link_secret (id, secret) VALUES (1, :secret) ON CONFLICT (id) DO NOTHING";

impl<E: Engine> LinkSecrets for E {
    fn link_secret(&self) -> BoxFuture<'_, Result<LinkSecret, StoreError>> {
        Box::pin(async {
            let read = || {
                self.read(ReadMode::Statement, |db| {
                    Box::pin(db.first(SECRET, &[], |row| row.get::<[u8; 32]>("secret")))
                })
            };
            if let Some(secret) = read().await? {
                return Ok(SecretBox::new(Box::new(secret)));
            }
            let mut random = [0; 32];
            getrandom::fill(&mut random).map_err(|error| {
                StoreError::Backend(format!("the system has no random numbers: {error}"))
            })?;
            self.apply(Changes::one(INSERT, values! {":secret": random}))
                .await?;
            let secret = read()
                .await?
                .ok_or_else(|| damaged("no secret for links"))?;
            Ok(SecretBox::new(Box::new(secret)))
        })
    }
}
