package pod

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// origin is the snapshot that a machine is made from.
type origin struct {
	info *snapshot.Info
	pod  *saved.Pod
	cold bool // as the checkpoint has it
}

// openOrigin reads what a snapshot says of its pod.
func openOrigin(store *snapshot.Store, id string) (*origin, error) {
	info, err := store.Inspect(id)
	if err != nil {
		return nil, err
	}
	p, err := saved.Decode(info.Note)
	if err != nil {
		return nil, err
	}
	return &origin{info: &info, pod: p}, nil
}

// checkpointed finds the container that the checkpoint is of, if there is one, and checks that the one to be created can
// be it.
func (n *creation) checkpointed() (err error) {
	n.specSum, err = specSum(n.plan.Guest)
	if err != nil {
		return err
	}
	if n.CreateRequest.Checkpoint == "" {
		return n.notPaused()
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("restore container %s: %w", n.ID, err)
		}
	}()
	c, err := saved.ReadCheckpoint(n.CreateRequest.Checkpoint)
	if err != nil {
		return err
	}
	if n.from, err = openOrigin(n.env.Snapshots(n.cfg), c.Snapshot); err != nil {
		return err
	}
	n.from.cold = c.Cold
	n.saved = n.from.pod.Container(c.Container)
	refuse := func(format string, args ...any) error {
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf(format, args...))
	}
	switch {
	case !n.from.info.Frozen:
		// What ran would go on with the identity of somebody else before it can be given its own.
		return refuse("the guest was not at rest when it was saved, so nothing else can be made of it")
	case n.saved == nil || len(n.from.pod.Containers) != 1 || len(n.saved.Processes) == 0:
		return refuse("snapshot %s is not of container %s alone", c.Snapshot, c.Container)
	case n.plan.Group != "" || n.reserved() != nil:
		return refuse("it would be a member of a pod, but it brings a virtual machine of its own")
	case len(n.plan.Shares) > 0:
		return refuse("%s of the host can't be mounted in a container that runs already", n.plan.Shares[0].Source)
	case n.saved.Processes[0].Terminal != n.Stdio.Terminal:
		return refuse("it was saved with terminal: %v, so it can't go on with terminal: %v", n.saved.Processes[0].Terminal, n.Stdio.Terminal)
	case n.saved.Spec != n.specSum:
		n.log.Info("the spec isn't what the container was saved with: what runs in it stays as it was")
	}
	return nil
}

// notPaused refuses to begin anew what is to go on from a checkpoint.
func (n *creation) notPaused() error {
	_, err := saved.PausedOf(n.cfg, n.env.Namespace, n.ID).Checkpoint()
	if errdefs.IsNotFound(err) {
		return nil
	}
	return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s is paused to disk: `cube resume %[1]s` has it go on, `cube rm %[1]s` removes it", n.ID))
}

// specSum is the digest of what a spec says of what runs in the guest.
func specSum(s *specs.Spec) (string, error) {
	named := *s
	named.Hostname, named.Annotations, named.Hooks = "", nil, nil
	if named.Linux != nil {
		linux := *named.Linux
		linux.CgroupsPath = ""
		named.Linux = &linux
	}
	b, err := json.Marshal(named)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

// store is the store of snapshots that the machine's are in.
func (k *making) store() *snapshot.Store { return k.env.Snapshots(k.cfg) }

// goOn makes the machine one that goes on from a snapshot.
func (k *making) goOn(from *origin) {
	k.from, k.snapshot = from, from.info.ID
	k.request.Snapshot, k.request.Shape = from.info.ID, vmm.Shape{}
	k.ownDisks()
	k.request.DiskDir = k.state.DiskDir
}

// ownDisks gives the machine a directory for disks that end with it.
func (k *making) ownDisks() {
	k.state.DiskDir = filepath.Join(k.cfg.DiskDir(), filepath.Base(k.request.Dir))
}

// adopt takes over the container that is in the machine already. It stands still until it is started.
func (n *creation) adopt(ctx context.Context, c *container, names *api.Stdio) error {
	n.expect(c)
	if err := n.name(ctx); err != nil {
		return err
	}
	// A container that has ended with the save goes on itself; all others are its clones.
	goesOn := n.from.pod.Last && n.saved.ID == n.ID
	_, err := n.vm.guest.AttachProcess(ctx, &api.AttachProcessRequest{Id: c.guestID, Stdio: names, GoesOn: goesOn})
	if err != nil {
		return fmt.Errorf("attach the container's stdio: %w", err)
	}
	return nil
}
