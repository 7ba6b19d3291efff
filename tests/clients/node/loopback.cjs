// Preloaded: a socket reaches this machine alone.
const net = require("node:net");
const connect = net.Socket.prototype.connect;
net.Socket.prototype.connect = function (...given) {
  const options = Array.isArray(given[0]) ? given[0][0] : given[0];
  const host = options?.host ?? "localhost";
  if (!options?.path && !/^(127\.|\[?::1|localhost)/.test(host)) throw new Error(`the network is blocked here: ${host}`);
  return connect.apply(this, given);
};
