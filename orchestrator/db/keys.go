package db

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"fmt"
	"regexp"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
)

const (
	// KeyPrefix is what every key begins with; 40 hexadecimal digits follow.
	KeyPrefix = "e2b_"
	keyDigits = 40
	// DefaultTeam is whose keys are that are made for no team in particular.
	DefaultTeam = "default"
	// useGrain is how exactly it is known when a key was used last.
	useGrain = time.Minute
)

var (
	keyForm  = regexp.MustCompile(`^` + KeyPrefix + `[0-9a-f]{40}$`)
	teamForm = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,63}$`)
)

// Key is what is known of a key: not the key itself.
type Key struct {
	ID, Team string // ID is a UUID
	// Prefix and Suffix are the first and last of its hexadecimal digits.
	Prefix, Suffix string
	CreatedAt      time.Time
	UsedAt         time.Time // to the minute, zero if never
	RevokedAt      time.Time // zero if it is good
}

// lastUses remembers which uses of keys are written down.
type lastUses struct {
	mu sync.Mutex
	at map[string]time.Time // by key id
}

// due tells whether a use of the key is worth writing down.
func (l *lastUses) due(id string, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.at[id]) < useGrain {
		return false
	}
	if l.at == nil {
		l.at = map[string]time.Time{}
	}
	l.at[id] = now
	return true
}

// CreateKey makes a key of a team, which is made if there is none of that name; "" is DefaultTeam. The key can't be read again.
func (d *DB) CreateKey(ctx context.Context, team string) (string, error) {
	if team == "" {
		team = DefaultTeam
	}
	if err := ValidTeam(team); err != nil {
		return "", err
	}
	var b [keyDigits / 2]byte
	_, _ = rand.Read(b[:]) // never fails
	digits := hex.EncodeToString(b[:])
	hash := sha256.Sum256([]byte(KeyPrefix + digits))
	err := d.update(ctx, func(tx *sql.Tx) error {
		now := stamp(time.Now())
		if _, err := tx.ExecContext(ctx, "INSERT OR IGNORE INTO teams (id, created) VALUES (?, ?)", team, now); err != nil {
			return err
		}
		if err := teamOpen(ctx, tx, team); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, "INSERT INTO keys (id, team, hash, prefix, suffix, created) VALUES (?, ?, ?, ?, ?, ?)",
			uuid.NewString(), team, hash[:], digits[:2], digits[keyDigits-4:], now)
		return err
	})
	if err != nil {
		return "", d.explain("write to", err)
	}
	return KeyPrefix + digits, nil
}

// ValidTeam refuses what can't be a team's name.
func ValidTeam(team string) error {
	if !teamForm.MatchString(team) {
		return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("team %q: up to 64 of a-z, 0-9, - and _ are possible, a letter or digit first", team))
	}
	return nil
}

// Authenticate tells whose key it is, and the key's id. A key that isn't one, or is none any more, is errdefs.ErrUnauthenticated.
func (d *DB) Authenticate(ctx context.Context, key string) (team, id string, err error) {
	refused := errdefs.ErrUnauthenticated.WithMessage("the API key is not valid")
	if !keyForm.MatchString(key) {
		return "", "", refused
	}
	hash := sha256.Sum256([]byte(key))
	err = d.read.QueryRowContext(ctx, "SELECT id, team FROM keys WHERE hash = ? AND revoked = 0", hash[:]).Scan(&id, &team)
	if err = d.explain("read", err); errdefs.IsNotFound(err) {
		return "", "", refused
	}
	if err != nil {
		return "", "", err
	}
	if now := time.Now(); d.uses.due(id, now) {
		// A disk that is full keeps nobody from killing sandboxes: the key is good, whatever becomes of this.
		_, _ = d.write.ExecContext(ctx, "UPDATE keys SET used = ? WHERE id = ?", stamp(now), id)
	}
	return team, id, nil
}

const keyColumns = "id, team, prefix, suffix, created, used, revoked"

func (k *Key) scan(scan func(...any) error) error {
	var created, used, revoked int64
	err := scan(&k.ID, &k.Team, &k.Prefix, &k.Suffix, &created, &used, &revoked)
	k.CreatedAt, k.UsedAt, k.RevokedAt = at(created), at(used), at(revoked)
	return err
}

// Keys lists all keys, also those that are revoked, oldest first.
func (d *DB) Keys(ctx context.Context) ([]Key, error) {
	rows, err := d.read.QueryContext(ctx, "SELECT "+keyColumns+" FROM keys ORDER BY created, id")
	return collect(d, rows, err, func(k *Key) error { return k.scan(rows.Scan) })
}

// Key tells of one, by its id or by itself, whether it is good or not.
func (d *DB) Key(ctx context.Context, key string) (k Key, err error) {
	hash := sha256.Sum256([]byte(key))
	err = k.scan(d.read.QueryRowContext(ctx, "SELECT "+keyColumns+" FROM keys WHERE id = ? OR hash = ?", key, hash[:]).Scan)
	return k, d.explain("read", err)
}

// RevokeKey makes a key worth nothing from now on. It is named by its id, or by itself.
func (d *DB) RevokeKey(ctx context.Context, key string) error {
	hash := sha256.Sum256([]byte(key))
	res, err := d.write.ExecContext(ctx, "UPDATE keys SET revoked = ? WHERE (id = ? OR hash = ?) AND revoked = 0", stamp(time.Now()), key, hash[:])
	if err != nil {
		return d.explain("write to", err)
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return errdefs.ErrNotFound.WithMessage("there is no such key that is good: `cube key ls` lists their ids")
	}
	return nil
}

// collect reads all rows of a query.
func collect[T any](d *DB, rows *sql.Rows, err error, scan func(*T) error) ([]T, error) {
	if err != nil {
		return nil, d.explain("read", err)
	}
	defer rows.Close()
	var all []T
	for rows.Next() {
		var one T
		if err := scan(&one); err != nil {
			return nil, d.explain("read", err)
		}
		all = append(all, one)
	}
	return all, d.explain("read", rows.Err())
}
