package usage

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm/artefact"
	"github.com/cubesandbox/cube/vmm/base"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// Options of Prune.
type Options struct {
	// DryRun changes nothing: what would be freed is told.
	DryRun bool
	// More is what others don't keep; it is removed first.
	More []Candidate
}

// Candidate is what somebody else doesn't keep.
type Candidate struct {
	Kind, Name, Why string
	// Snapshot is the machine's snapshot that goes with it, by its name in the store, "" for none.
	Snapshot string
	// Remove removes it, unless it is needed by now, and tells whether it is gone.
	Remove func(ctx context.Context) (gone bool, err error)
}

// Freed is what a Prune has removed, or would.
type Freed struct {
	Items []Removed `json:"items"`
	// Notes say what couldn't be looked at, and what to do about it.
	Notes []string `json:"notes,omitempty"`
}

// Removed is one thing of it.
type Removed struct {
	Kind  string `json:"kind"`
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"` // that come free with it alone; what it shares comes free with the last who has it
	Why   string `json:"why"`
}

// candidate is what may go.
type candidate struct {
	Removed
	// remove looks again, and tells whether it is gone.
	remove func(ctx context.Context) (gone bool, err error)
}

// Prune removes what nobody needs: half-made things, disks without a pod, snapshots whose reasons are gone, base snapshots and
// artefacts of another time, unused layers. A failure doesn't keep it from the rest.
func Prune(ctx context.Context, cfg *config.Config, o Options) (Freed, error) {
	freed := Freed{Items: []Removed{}} // an empty list is one, in JSON too
	p := &plan{cfg: cfg, freed: &freed}
	c, err := sandbox.Connect(ctx, cfg)
	if err != nil {
		freed.Notes = append(freed.Notes, "layers and paused containers weren't looked at: "+err.Error())
	} else {
		defer c.Close()
		p.ctrd = c
	}
	errs := []error{p.find(ctx, 0)}
	for i, c := range o.More {
		bytes := int64(0)
		if c.Snapshot != "" && p.tally != nil {
			bytes = p.tally.ownOf(filepath.Join(cfg.SnapshotDir(), c.Snapshot))
		}
		p.candidates = slices.Insert(p.candidates, i, candidate{Removed{Kind: c.Kind, Name: c.Name, Bytes: bytes, Why: c.Why}, c.Remove})
	}
	for _, c := range p.candidates {
		gone := o.DryRun
		if !gone {
			gone, err = c.remove(ctx)
			errs = append(errs, err)
		}
		if gone {
			freed.Items = append(freed.Items, c.Removed)
		}
	}
	if p.ctrd != nil {
		unused, err := pruneLayers(ctx, p.ctrd, o.DryRun)
		freed.Items = append(freed.Items, unused...)
		errs = append(errs, err)
	}
	return freed, errors.Join(errs...)
}

// Tidy is Prune for a stack that starts: it leaves layers to containerd and paused containers to who has it, and of unneeded artefacts the last that were used, to
// which a set-up may go back.
func Tidy(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
	p := &plan{cfg: cfg, freed: &Freed{}}
	errs := []error{p.find(ctx, spareArtefacts)}
	for _, c := range p.candidates {
		gone, err := c.remove(ctx)
		errs = append(errs, err)
		if gone {
			log.Info("removed what nobody needs", "kind", c.Kind, "name", c.Name, "bytes", c.Bytes, "why", c.Why)
		}
	}
	for _, note := range p.freed.Notes {
		log.Info(note)
	}
	return errors.Join(errs...)
}

// spareArtefacts is how many unneeded artefacts of each kind Tidy leaves.
const spareArtefacts = 2

// plan is what may go.
type plan struct {
	cfg        *config.Config
	ctrd       *sandbox.Client // nil: what only containerd knows isn't looked at
	freed      *Freed
	tally      *tally
	candidates []candidate
	doomed     map[string]bool // ids of snapshots
}

// find finds all but layers; of unneeded artefacts it leaves spare of each kind.
func (p *plan) find(ctx context.Context, spare int) (err error) {
	if p.tally, err = account(ctx, p.cfg); err != nil {
		return err
	}
	p.doomed = map[string]bool{}
	return errors.Join(p.findHalfMade(), p.findDisks(), p.findPaused(ctx), p.findSnapshots(ctx), p.findBases(), p.findArtefacts(spare))
}

func (p *plan) add(kind, name, why string, bytes int64, remove func(context.Context) (bool, error)) {
	p.candidates = append(p.candidates, candidate{Removed{Kind: kind, Name: name, Bytes: bytes, Why: why}, remove})
}

// findHalfMade finds what killed processes were making, or removing.
func (p *plan) findHalfMade() error {
	quiet := slog.New(slog.DiscardHandler)
	snaps := snapshot.New(p.cfg, quiet)
	left, err := snaps.HalfMade()
	p.addHalfMade("snapshot", left, snaps.Sweep)
	p.addHalfMade("base snapshot", base.HalfMade(p.cfg), func() error { base.RemoveHalfMade(p.cfg, quiet); return nil })
	errs := []error{err}
	for _, current := range []string{p.cfg.QEMUDir(), p.cfg.GuestDir()} {
		parent := filepath.Dir(current)
		left, err := artefact.HalfMade(parent)
		errs = append(errs, err)
		p.addHalfMade("artefact", left, func() error { return artefact.RemoveHalfMade(parent) })
	}
	return errors.Join(errs...)
}

func (p *plan) addHalfMade(kind string, dirs []string, remove func() error) {
	for _, dir := range dirs {
		p.add(kind, filepath.Base(dir), "half-made", treeSize(dir), func(context.Context) (bool, error) {
			err := remove() // all of them, and none that has an owner by now
			_, left := os.Lstat(dir)
			return left != nil, err
		})
	}
}

func (p *plan) findSnapshots(ctx context.Context) error {
	all, err := snapshot.New(p.cfg, slog.New(slog.DiscardHandler)).List()
	if err != nil {
		return err
	}
	for _, info := range all {
		why, err := forsaken(ctx, p.cfg, info)
		if err != nil {
			return err
		}
		if why == "" {
			continue
		}
		p.doomed[info.ID] = true
		p.add("snapshot", info.ID, why, p.tally.ownOf(filepath.Join(p.cfg.SnapshotDir(), info.ID)), func(ctx context.Context) (bool, error) {
			if why, err := forsaken(ctx, p.cfg, info); why == "" || err != nil {
				return false, err
			}
			return removeSnapshot(ctx, p.cfg, info)
		})
	}
	return nil
}

// findPaused finds what containers were paused with that have no use for it any more.
func (p *plan) findPaused(ctx context.Context) error {
	if p.ctrd == nil {
		return nil
	}
	spent, err := p.ctrd.SpentPaused(ctx)
	for _, s := range spent {
		var bytes int64
		if s.Snapshot != "" {
			p.doomed[s.Snapshot] = true
			bytes = p.tally.ownOf(filepath.Join(p.cfg.SnapshotDir(), s.Snapshot))
		}
		p.add("paused", s.Ref.String(), s.Why, bytes, func(ctx context.Context) (bool, error) { return p.ctrd.Settle(ctx, s.Ref) })
	}
	return err
}

// removeSnapshot removes one that is forsaken; of one that clones were being made of, those that aren't whole, too.
func removeSnapshot(ctx context.Context, cfg *config.Config, info snapshot.Info) (gone bool, err error) {
	store := snapshot.New(cfg, slog.New(slog.DiscardHandler))
	p, err := saved.Decode(info.Note)
	if err != nil {
		return false, err
	}
	if p.Purpose != saved.ForClone {
		_, err := store.Delete(info.ID)
		if errdefs.IsNotFound(err) { // somebody else has
			return false, nil
		}
		return err == nil, err
	}
	c, err := sandbox.Connect(ctx, cfg)
	if err != nil {
		return false, err
	}
	defer c.Close()
	_, err = c.UndoClones(ctx)
	_, left := store.Inspect(info.ID)
	return errdefs.IsNotFound(left), err
}

func (p *plan) findBases() error {
	kept, err := base.Kept(p.cfg)
	if err != nil {
		return err
	}
	for _, k := range kept {
		if k.Stale == "" || k.InUse {
			continue
		}
		p.add("base snapshot", k.Name, k.Stale, p.tally.ownOf(k.Dir), func(ctx context.Context) (bool, error) { return k.Remove(ctx, p.cfg) })
	}
	return nil
}

func (p *plan) findArtefacts(spare int) error {
	unneeded, err := base.Unneeded(p.cfg, func(id string) bool { return p.doomed[id] })
	if errdefs.IsFailedPrecondition(err) {
		p.freed.Notes = append(p.freed.Notes, err.Error())
		return nil
	}
	if err != nil {
		return err
	}
	left := map[string]int{}
	var gone []base.Artefact
	for _, a := range slices.Backward(unneeded) {
		if left[a.Kind]++; left[a.Kind] > spare {
			gone = append(gone, a)
		}
	}
	for _, a := range slices.Backward(gone) {
		p.add("artefact", filepath.Join(a.Kind, a.Digest), "no machine and no snapshot needs it", p.tally.ownOf(a.Dir), a.Remove)
	}
	return nil
}

// pruneLayers has containerd remove what it needs no more, and tells which layers these were.
func pruneLayers(ctx context.Context, c *sandbox.Client, dryRun bool) ([]Removed, error) {
	unused, err := c.UnusedLayers(ctx)
	if err != nil {
		return nil, err
	}
	if !dryRun {
		if err := c.CollectGarbage(ctx); err != nil {
			return nil, err
		}
		left, err := c.UnusedLayers(ctx)
		if err != nil {
			return nil, err
		}
		unused = slices.DeleteFunc(unused, func(l sandbox.Layer) bool {
			return slices.ContainsFunc(left, func(k sandbox.Layer) bool { return k.Namespace == l.Namespace && k.Key == l.Key })
		})
	}
	var all []Removed
	for _, l := range unused {
		all = append(all, Removed{Kind: "layer", Name: l.Namespace + "/" + l.Key, Bytes: l.Size, Why: "no image and no container has it"})
	}
	return all, nil
}
