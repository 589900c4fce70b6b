package leftover

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
	shimrecord "github.com/cubesandbox/cube/shim/record"
)

var attachmentFinder = finder{"network attachment", false, attachments}

// Attachments is Find for places in the network only, which takes neither containerd nor long.
func Attachments(ctx context.Context, cfg *config.Config) ([]Leftover, error) {
	return attachmentFinder.of(ctx, &search{cfg: cfg})
}

// attachments finds the places in the network of pods that are gone.
func attachments(ctx context.Context, s *search) ([]Leftover, error) {
	n := network.New(s.cfg)
	// Before the pods: a pod's record is there before it has a place, and until it has none.
	all, err := n.List(ctx)
	errs := []error{err}
	var found []Leftover
	for _, a := range all {
		why, err := s.nobodys(a)
		errs = append(errs, err)
		if why == "" {
			continue
		}
		found = append(found, Leftover{
			Name:   a.Key,
			Detail: "tap " + a.Tap + ": " + why,
			Since:  a.Changed,
			Remedy: "closes its tap and gives it back",
			remove: func(ctx context.Context) error {
				return n.Abandon(ctx, a.Key, func(again *network.Attachment) (bool, error) {
					why, err := s.nobodys(again)
					return why != "", err
				})
			},
		})
	}
	return found, errors.Join(errs...)
}

// taps finds those that are neither a pod's nor ready for one.
func taps(ctx context.Context, s *search) ([]Leftover, error) {
	n := network.New(s.cfg)
	strays, err := n.Strays(ctx)
	var found []Leftover
	for _, name := range strays {
		found = append(found, Leftover{
			Name:   name,
			Detail: "whoever made or freed it was killed meanwhile",
			Remedy: "removes it, as the next `cube up` does",
			remove: n.Repair,
		})
	}
	return found, err
}

// nobodys says why a place in the network is nobody's, "" where it may be somebody's: a pod's, or a CNI runtime's, which has
// a network namespace for it as long as its container is there.
func (s *search) nobodys(a *network.Attachment) (why string, err error) {
	if !s.old(a.Changed) {
		return "", nil
	}
	why = "no pod has claimed it"
	if a.Pod != nil {
		if there, err := hasPod(s.cfg, *a.Pod); err != nil || there {
			return "", err
		}
		why = fmt.Sprintf("pod %s is gone", a.Pod)
	}
	if !a.Open || a.Network == network.Own {
		return why, nil
	}
	if a.NetNS == "" {
		return "", nil
	}
	if _, err := os.Stat(a.NetNS); !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	return fmt.Sprintf("%s, network %s was to close it, and namespace %s is gone", why, a.Network, a.NetNS), nil
}

// hasPod says whether a shim has, or had and nobody has cleared, such a pod.
func hasPod(cfg *config.Config, pod network.Pod) (bool, error) {
	all, err := shimrecord.Pods(cfg.PodDir())
	if err != nil {
		return false, err
	}
	for _, p := range all {
		state, err := p.State()
		if errors.Is(err, fs.ErrNotExist) {
			continue // it has nothing yet, or nothing any more
		} else if err != nil {
			return false, err
		}
		if state.Namespace == pod.Namespace && state.ID == pod.ID {
			return true, nil
		}
	}
	return false, nil
}
