package admission

import (
	"sync"

	"github.com/cubesandbox/cube/internal/config"
)

// Entry is what there is of a sandbox.
type Entry struct {
	// Team is whose share it is of, "" for nobody's.
	Team string
	Shape
	// Machine: it has a machine, or is about to. Otherwise there is only its disk.
	Machine bool
	// Spare: it is made ahead, for whoever comes, and can be given up for who does.
	Spare bool
}

// Ledger has the accounts. What it is told of rows by Set, End and Drop it takes as it is; what comes on top by Reserve has to fit, and
// is there until Release: in between a row takes its place, so that nothing is counted twice or not at all. All methods may be called
// from many goroutines.
type Ledger struct {
	policy *config.Admission
	limits *config.Limits

	mu       sync.Mutex
	accounts map[string]*account
	reserved Amount
	spare    Amount // part of reserved
	teams    map[string]*tally
}

// account is one sandbox's.
type account struct {
	row     *Entry // nil: there is none
	claims  int    // reservations that aren't released
	claimed Entry  // the latest of them
}

// now is what counts of it: nil for nothing.
func (a *account) now() *Entry {
	if a.claims > 0 {
		return &a.claimed
	}
	return a.row
}

// tally is what a team has.
type tally struct {
	Use
	snapshots int // that are being made
	creates   bucket
}

// Use is what sandboxes of a team have, of what is theirs and not of what is reserved; sizes are in bytes.
type Use struct {
	// Running have machines, Paused don't.
	Running, Paused int
	VCPUs           int   // of those that run
	Memory          int64 // of those that run
	Disk            int64
}

// NewLedger makes an empty one. What it is given isn't changed any more.
func NewLedger(a *config.Admission, l *config.Limits) *Ledger {
	return &Ledger{policy: a, limits: l, accounts: map[string]*account{}, teams: map[string]*tally{}}
}

// Set has a row say what there is of a sandbox.
func (l *Ledger) Set(id string, e Entry) {
	l.change(id, func(a *account) { a.row = &e })
}

// End says that a sandbox is being removed: it is no team's any more, but what it has isn't free yet.
func (l *Ledger) End(id string) {
	l.change(id, func(a *account) {
		if a.row != nil {
			ending := *a.row
			ending.Team, ending.Spare = "", false
			a.row = &ending
		}
	})
}

// Drop says that there is no row any more.
func (l *Ledger) Drop(id string) {
	l.change(id, func(a *account) { a.row = nil })
}

// Release ends a reservation. What there is of the sandbox then is what its row says.
func (l *Ledger) Release(id string) {
	l.change(id, func(a *account) { a.claims = max(a.claims-1, 0) })
}

func (l *Ledger) change(id string, do func(*account)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.accounts[id]
	if a == nil {
		a = &account{}
		l.accounts[id] = a
	}
	l.count(a.now(), -1)
	do(a)
	l.count(a.now(), 1)
	if a.row == nil && a.claims == 0 {
		delete(l.accounts, id)
	}
}

// count adds an entry to the sums, or takes it from them. mu is held.
func (l *Ledger) count(e *Entry, sign int) {
	if e == nil {
		return
	}
	need := l.needs(e)
	if sign < 0 {
		need = Amount{}.minus(need)
	}
	l.reserved = l.reserved.plus(need)
	if e.Spare {
		l.spare = l.spare.plus(need)
	}
	if e.Team == "" {
		return
	}
	u := &l.team(e.Team).Use
	*u = u.with(e, sign)
}

// needs is what an entry takes of the host.
func (l *Ledger) needs(e *Entry) Amount {
	if e == nil {
		return Amount{}
	}
	need := Need(l.policy, e.Shape)
	if !e.Machine {
		need.MilliCPU, need.Memory = 0, 0
	}
	return need
}

func (u Use) with(e *Entry, sign int) Use {
	if e.Machine {
		u.Running += sign
		u.VCPUs += sign * e.VCPUs
		u.Memory += int64(sign) * int64(e.MemoryMB) << 20
	} else {
		u.Paused += sign
	}
	u.Disk += int64(sign) * int64(e.DiskMB) << 20
	return u
}

func (u Use) minus(v Use) Use {
	return Use{u.Running - v.Running, u.Paused - v.Paused, u.VCPUs - v.VCPUs, u.Memory - v.Memory, u.Disk - v.Disk}
}

// team is a team's. mu is held.
func (l *Ledger) team(name string) *tally {
	t := l.teams[name]
	if t == nil {
		t = &tally{}
		l.teams[name] = t
	}
	return t
}

// Reserve sets aside what a sandbox is going to have, unless its team or the host has not enough of it: a *Refusal then. What it has
// already is the sandbox's own. create: it is one of the creates of which its team may have so many in a minute.
//
// Each is to be followed by a Release.
func (l *Ledger) Reserve(id string, e Entry, h Reading, create bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.accounts[id]
	var was *Entry
	if a != nil {
		was = a.now()
	}
	if err := l.allows(was, &e, create); err != nil {
		return err
	}
	if err := l.fits(l.needs(was), l.needs(&e), h); err != nil {
		return err
	}
	if a == nil {
		a = &account{}
		l.accounts[id] = a
	}
	if create {
		l.team(e.Team).creates.take()
	}
	l.count(was, -1)
	a.claims++
	a.claimed = e
	l.count(&a.claimed, 1)
	return nil
}

// Totals are the sums.
type Totals struct {
	Reserved Amount
	// Spare is the part of it that is of spare entries.
	Spare Amount
	// Teams are what teams have that have anything.
	Teams map[string]Use
}

// Totals tells the sums.
func (l *Ledger) Totals() Totals {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := Totals{Reserved: l.reserved, Spare: l.spare, Teams: map[string]Use{}}
	for name, of := range l.teams {
		if of.Use != (Use{}) {
			t.Teams[name] = of.Use
		}
	}
	return t
}

// Residents are what is reserved of memory for each resident sandbox that has a machine, in bytes.
func (l *Ledger) Residents() map[string]int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all map[string]int64
	for id, a := range l.accounts {
		if e := a.now(); e.Machine && e.Profile == Resident {
			if all == nil {
				all = map[string]int64{}
			}
			all[id] = l.needs(e).Memory
		}
	}
	return all
}
