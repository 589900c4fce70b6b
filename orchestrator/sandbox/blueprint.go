package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// Blueprint is what containerd has to know of a container that is made from a snapshot of another one, which needn't be there
// any more.
type Blueprint struct {
	Image string      `json:"image"`
	Spec  *specs.Spec `json:"spec"`
}

// Blueprint is that of snapshots of a container.
func (c *Client) Blueprint(ctx context.Context, id string) (Blueprint, error) {
	ctx = c.context(ctx)
	ctr, err := c.container(ctx, id)
	if err != nil {
		return Blueprint{}, err
	}
	image, err := ctr.Image(ctx)
	if err != nil {
		return Blueprint{}, fmt.Errorf("look up the image of container %s: %w", id, err)
	}
	s, err := cloneSpec(ctx, ctr)
	if err != nil {
		return Blueprint{}, err
	}
	return Blueprint{Image: image.Name(), Spec: s}, nil
}

// Draft is the blueprint of a container that is asked for, without making it.
func (c *Client) Draft(ctx context.Context, s Spec) (Blueprint, error) {
	ctx = c.context(ctx)
	img, err := c.ensure(ctx, s.Image, s.Outside, nil)
	if err != nil {
		return Blueprint{}, fmt.Errorf("image %s: %w", s.Image, err)
	}
	config, err := img.Spec(ctx)
	if err != nil {
		return Blueprint{}, fmt.Errorf("read image %s: %w", img.Name(), err)
	}
	opts, err := s.options(config.Config)
	if err != nil {
		return Blueprint{}, err
	}
	made, err := oci.GenerateSpec(ctx, c.ctrd, &containers.Container{ID: s.ID}, opts...)
	if err != nil {
		return Blueprint{}, fmt.Errorf("make the spec of container %s: %w", s.ID, err)
	}
	return Blueprint{Image: img.Name(), Spec: made}, nil
}

// Restored asks for a container that goes on from a snapshot.
type Restored struct {
	ID       string
	Snapshot string
	Blueprint
	// Network is what it reaches; nil: nothing.
	Network *network.Settings
	// Labels are containerd's.
	Labels map[string]string
}

// Restore makes a container from a snapshot. Its output goes to its log file.
func (c *Client) Restore(ctx context.Context, r Restored) error {
	ctx = c.context(ctx)
	if r.Spec == nil || r.Spec.Annotations == nil {
		return errdefs.ErrInvalidArgument.WithMessage("the blueprint of container " + r.ID + " has no spec")
	}
	image, err := c.ctrd.GetImage(ctx, r.Image)
	if errdefs.IsNotFound(err) && r.Image == Blank { // somebody has removed it
		image, err = c.makeBlank(ctx)
	}
	if err != nil {
		return fmt.Errorf("the image of container %s: %w", r.ID, err)
	}
	s := *r.Spec
	s.Hostname = hostname(r.ID)
	s.Annotations = maps.Clone(s.Annotations)
	s.Annotations[spec.NetworkKey] = spec.NoNetwork
	if r.Network != nil {
		b, err := json.Marshal(r.Network)
		if err != nil {
			return fmt.Errorf("encode the network's settings: %w", err)
		}
		s.Annotations[spec.NetworkKey] = string(b)
	}
	dir, release, err := c.checkpoint(ctx, r.ID, r.Snapshot, false)
	if err != nil {
		return err
	}
	defer release() // a directory that is left is removed by the next cube up
	return c.restore(ctx, r.ID, image, &s, dir, r.Labels)
}

// checkpoint makes a directory with a checkpoint of a snapshot, for the container to be created from it. It is there until release.
func (c *Client) checkpoint(ctx context.Context, id, name string, cold bool) (dir string, release func() error, err error) {
	origin, err := c.savedContainer(name)
	if err != nil {
		return "", nil, err
	}
	dir, release, err = c.claim(ctx, "restore-"+id)
	if err != nil {
		return "", nil, fmt.Errorf("make the directory of the checkpoint: %w", err)
	}
	if err := (saved.Checkpoint{Snapshot: name, Container: origin, Cold: cold}).Write(dir); err != nil {
		return "", nil, errors.Join(err, release())
	}
	return dir, release, nil
}

// savedContainer is the id that the one container of a snapshot had.
func (c *Client) savedContainer(name string) (string, error) {
	info, err := snapshot.New(c.cfg, slog.New(slog.DiscardHandler)).Inspect(name)
	if err != nil {
		return "", err
	}
	p, err := saved.Decode(info.Note)
	if err != nil {
		return "", fmt.Errorf("snapshot %s: %w", name, err)
	}
	if len(p.Containers) != 1 {
		return "", errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("snapshot %s is of %d containers: a container can be made of one", name, len(p.Containers)))
	}
	return p.Containers[0].ID, nil
}

// SetNetwork replaces what a container reaches when it is started or resumed next. What it reaches as it runs isn't changed.
func (c *Client) SetNetwork(ctx context.Context, id string, settings *network.Settings) error {
	ctx = c.context(ctx)
	ctr, err := c.container(ctx, id)
	if err != nil {
		return err
	}
	b, err := json.Marshal(settings)
	if err != nil {
		return fmt.Errorf("encode the network's settings: %w", err)
	}
	err = ctr.Update(ctx, func(_ context.Context, _ *client.Client, r *containers.Container) error {
		var s specs.Spec
		if err := typeurl.UnmarshalTo(r.Spec, &s); err != nil {
			return err
		}
		if s.Annotations == nil {
			s.Annotations = map[string]string{}
		}
		s.Annotations[spec.NetworkKey] = string(b)
		var err error
		r.Spec, err = typeurl.MarshalAny(&s)
		return err
	})
	if err != nil {
		return fmt.Errorf("write down the network of container %s: %w", id, err)
	}
	return nil
}
