//! Reads the bytes of pictures and files.

use bytes::Bytes;

use crate::domain::attachment::{Blobs, Digest};
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::reader::Reader;
use crate::store::sql::value::params;

/// The bytes with these digests; unknown digests are left out.
pub async fn read(db: &Reader, digests: &[Digest]) -> StoreResult<Blobs> {
    let mut blobs = Blobs::new();
    if digests.is_empty() {
        return Ok(blobs);
    }
    let hashes: Vec<&[u8]> = digests.iter().map(|digest| &digest.0[..]).collect();
    let sql = "SELECT hash, data FROM attachments WHERE hash = ANY(:hashes)";
    for row in db.rows(sql, params! {":hashes": hashes}).await? {
        let digest = Digest(rows::hash(&row, "hash")?.unwrap_or_default());
        let data: Vec<u8> = rows::get(&row, "data")?;
        blobs.insert(digest, Bytes::from(data));
    }
    Ok(blobs)
}
