package leftover

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/orchestrator/stack"
	"github.com/cubesandbox/cube/vmm/jail"
	"github.com/cubesandbox/cube/vmm/record"
)

// groupLimit bounds the removal of a control group: what was in it is killed.
const groupLimit = 5 * time.Second

// endLimit is how long containerd may take to report the end of a task whose machine has just gone.
const endLimit = 5 * time.Second

// machines finds the directories of machines whose shims are gone.
func machines(_ context.Context, s *search) ([]Leftover, error) {
	left, err := record.Leftovers(s.cfg)
	var found []Leftover
	for _, l := range left {
		found = append(found, Leftover{
			Name:   l.Dir,
			Detail: describe(l.State),
			Since:  l.Since,
			Remedy: "ends its QEMU and frees its control group, uid and directory",
			remove: func(context.Context) error { return l.Cleanup(s.cfg) },
		})
	}
	return found, err
}

// describe says what a machine without an owner still has.
func describe(st record.State) string {
	switch {
	case st.ID == "":
		return "without a record"
	case st.QEMU.Alive():
		return fmt.Sprintf("its shim %d is gone, its QEMU %d runs", st.Owner.PID, st.QEMU.PID)
	}
	return fmt.Sprintf("its shim %d is gone", st.Owner.PID)
}

// groups finds the control groups of machines that are gone.
func groups(_ context.Context, s *search) ([]Leftover, error) {
	names, err := record.OrphanGroups(s.cfg)
	var found []Leftover
	for _, name := range names {
		found = append(found, Leftover{
			Name:   name,
			Detail: "its machine is gone",
			Remedy: "kills what is in it and removes it",
			remove: func(ctx context.Context) error {
				ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout(groupLimit))
				defer cancel()
				return record.RemoveOrphanGroup(ctx, s.cfg, name)
			},
		})
	}
	return found, err
}

// uids finds those that are taken for what is gone, by a process that is gone.
func uids(_ context.Context, s *search) ([]Leftover, error) {
	pool := jail.NewUIDs(s.cfg)
	taken, err := pool.Taken()
	var found []Leftover
	for _, t := range taken {
		if _, err := os.Lstat(t.Dir); t.Owner.Alive() || !errors.Is(err, fs.ErrNotExist) {
			continue // what there is of its directory gives it back
		}
		found = append(found, Leftover{
			Name:   fmt.Sprint(t.UID),
			Detail: "taken for " + t.Dir + ", which is gone",
			Since:  t.Since,
			Remedy: "gives it back unless something runs under it",
			remove: func(context.Context) error { pool.Sweep(); return nil },
		})
	}
	return found, err
}

// sockets finds those that dead shims of the private containerd have left. An existing containerd's are among others'.
func sockets(ctx context.Context, s *search) ([]Leftover, error) {
	dir := stack.ShimSocketDir(s.cfg)
	if s.cfg.Containerd.Address != "" || dir == "" {
		return nil, nil
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var found []Leftover
	for _, e := range entries {
		info, err := e.Info()
		path := filepath.Join(dir, e.Name())
		// One that is being made refuses connections until its maker listens.
		if err != nil || info.Mode().Type() != fs.ModeSocket || !s.old(info.ModTime()) || !refused(ctx, path) {
			continue
		}
		found = append(found, Leftover{
			Name:   path,
			Detail: "nobody listens",
			Since:  info.ModTime(),
			Remedy: "removes it",
			remove: func(context.Context) error { return removeFile(path) },
		})
	}
	return found, err
}

// refused says whether nobody listens on a socket. Any other answer, or none, may be somebody.
func refused(ctx context.Context, path string) bool {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err == nil {
		c.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// tasks finds those that containerd takes to be running although their machines are gone.
func tasks(ctx context.Context, s *search) ([]Leftover, error) {
	all, err := record.Machines(s.cfg)
	if err != nil {
		return nil, err
	}
	var found []Leftover
	for _, r := range ghosts(s.inv, all) {
		// The machine's end may be on its way to containerd.
		if s.ctrd.EndsWithin(ctx, r, s.cfg.Timeout(endLimit)) {
			continue
		}
		found = append(found, Leftover{
			Name:   r.String(),
			Detail: fmt.Sprintf("containerd takes it to be running, its machine %d is gone", s.inv.Tasks[r].PID),
			Remedy: fmt.Sprintf("`ctr -n %s task rm -f %s` or `cube rm -f %s`; if that fails, `cube down` and `cube up -d`", r.Namespace, r.ID, r.ID),
		})
	}
	return found, nil
}

// ghosts are this runtime's tasks that run in machines that don't.
func ghosts(inv *sandbox.Inventory, machines []record.Machine) []sandbox.Ref {
	run := make(map[uint32]bool)
	for _, m := range machines {
		if m.State.QEMU.Alive() {
			run[uint32(m.State.QEMU.PID)] = true
		}
	}
	var ghosts []sandbox.Ref
	for r, t := range inv.Tasks {
		if t.Alive && inv.Containers[r] == sandbox.Runtime && !run[t.PID] {
			ghosts = append(ghosts, r)
		}
	}
	slices.SortFunc(ghosts, func(a, b sandbox.Ref) int { return cmp.Compare(a.String(), b.String()) })
	return ghosts
}
