package network

import "context"

// Abandon frees a place, of whom nobody is left to say so: List has its key. nobodys judges it when nobody else can change
// it: who claims or opens it later gets another one.
func (n *Network) Abandon(ctx context.Context, key string, nobodys func(*Attachment) (bool, error)) error {
	return n.let(ctx, key, func(s *session, a *attachment) error {
		if is, err := nobodys(s.describe(a)); err != nil || !is {
			return err
		}
		if a.Open != nil {
			if err := s.close(ctx, a); err != nil {
				return err
			}
		}
		return s.unclaim(a)
	})
}
