package config

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// Retention says how long what teams have saved is kept: what a team's own table says goes before what is said for all.
type Retention struct {
	Keep
	Team map[string]Keep `toml:"team" json:"team,omitempty"`
}

// Keep is what is kept; what isn't set is what is said for all, and if that isn't set, for good.
type Keep struct {
	// SnapshotTTL is how long a snapshot of a sandbox is kept; 0 = for good.
	SnapshotTTL *Duration `toml:"snapshot_ttl" json:"snapshot_ttl,omitempty"`
	// SnapshotKeep is how many snapshots are kept of one name, and of one sandbox those without a name, the latest; 0 = all.
	SnapshotKeep *int `toml:"snapshot_keep" json:"snapshot_keep,omitempty"`
	// PausedTTL is how long a sandbox may be paused; 0 = for good.
	PausedTTL *Duration `toml:"paused_ttl" json:"paused_ttl,omitempty"`
	// PausedKeep is how many paused sandboxes are kept of a team, those that were paused last; 0 = all.
	PausedKeep *int `toml:"paused_keep" json:"paused_keep,omitempty"`
}

// Kept is what is kept of one team: 0 is for good, or all.
type Kept struct {
	SnapshotTTL, PausedTTL   time.Duration
	SnapshotKeep, PausedKeep int
}

// Of is what is kept of a team.
func (r Retention) Of(team string) Kept {
	own := r.Team[team]
	return Kept{
		SnapshotTTL: time.Duration(first(own.SnapshotTTL, r.SnapshotTTL)), SnapshotKeep: first(own.SnapshotKeep, r.SnapshotKeep),
		PausedTTL: time.Duration(first(own.PausedTTL, r.PausedTTL)), PausedKeep: first(own.PausedKeep, r.PausedKeep),
	}
}

// Forever tells whether all is kept of all teams.
func (r Retention) Forever() bool {
	for team := range r.Team {
		if r.Of(team) != (Kept{}) {
			return false
		}
	}
	return Retention{Keep: r.Keep}.Of("") == Kept{}
}

// With is what is kept if what k says is so for all teams.
func (r Retention) With(k Keep) Retention {
	over := func(with Keep) Keep {
		return Keep{
			SnapshotTTL: firstSet(k.SnapshotTTL, with.SnapshotTTL), SnapshotKeep: firstSet(k.SnapshotKeep, with.SnapshotKeep),
			PausedTTL: firstSet(k.PausedTTL, with.PausedTTL), PausedKeep: firstSet(k.PausedKeep, with.PausedKeep),
		}
	}
	all := Retention{Keep: over(r.Keep), Team: map[string]Keep{}}
	for team, own := range r.Team {
		all.Team[team] = over(own)
	}
	return all
}

// firstSet is the first that is set, nil if none is.
func firstSet[T any](values ...*T) *T {
	for _, p := range values {
		if p != nil {
			return p
		}
	}
	return nil
}

// first is the first value that there is, or nought.
func first[T any](values ...*T) (v T) {
	if p := firstSet(values...); p != nil {
		return *p
	}
	return v
}

// Validate refuses what makes no sense.
func (r Retention) Validate() error {
	if err := r.Keep.validate("retention"); err != nil {
		return err
	}
	for _, team := range slices.Sorted(maps.Keys(r.Team)) {
		if err := validTeam("retention", team); err != nil {
			return err
		}
		if err := r.Team[team].validate("retention.team." + team); err != nil {
			return err
		}
	}
	return nil
}

func (k Keep) validate(table string) error {
	for key, d := range map[string]*Duration{"snapshot_ttl": k.SnapshotTTL, "paused_ttl": k.PausedTTL} {
		if d != nil && *d != 0 && time.Duration(*d) < time.Second {
			return fmt.Errorf("%s.%s = %q must be 0 or at least a second", table, key, time.Duration(*d))
		}
	}
	for key, n := range map[string]*int{"snapshot_keep": k.SnapshotKeep, "paused_keep": k.PausedKeep} {
		if n != nil && *n < 0 {
			return fmt.Errorf("%s.%s = %d must be 0 or more", table, key, *n)
		}
	}
	return nil
}
