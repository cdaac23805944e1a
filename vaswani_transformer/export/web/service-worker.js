"use strict";

// Keeps the files of this site, so that it works without a network.
const SITE = `vaswani ${registration.scope} `, VERSION = `${SITE}{version}`, FILES = {files}; // others may have the origin

addEventListener("install", (event) => {
  // Not from the browser's own cache, which may hold files of the version before, as a server does during an upload.
  const fresh = Object.entries(FILES).map(([file, integrity]) => new Request(file, {cache: "reload", integrity}));
  event.waitUntil(caches.open(VERSION).then((cache) => cache.addAll(fresh)).then(() => skipWaiting()));
});
addEventListener("activate", (event) => {
  const old = (names) => names.filter((name) => name.startsWith(SITE) && name !== VERSION);
  event.waitUntil(caches.keys().then((names) => Promise.all(old(names).map((name) => caches.delete(name))))
    .then(() => clients.claim()));
});
addEventListener("fetch", (event) => {
  event.respondWith(caches.match(event.request, {ignoreSearch: true}).then((known) => known || fetch(event.request)));
});
